"""Prose about files stays true, and programs in it run."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lifecycle.errors
from lifecycle import LifecycleError

ROOT = Path(__file__).parent.parent
PAGES = [
    "AGENTS.md",
    "README.md",
    "docs/architecture.md",
    "docs/benchmarks/README.md",
    "docs/checker-spin.md",
    "docs/checker.md",
    "docs/diagrams.md",
    "docs/extending.md",
    "docs/gpu.md",
    "docs/memory-saver.md",
    "docs/traffic.md",
    "docs/trainers.md",
    "docs/workspaces.md",
]
PATH = re.compile(r"`((?:states|lifecycle|tests|docs|\.ci)/[\w./-]*|[\w-]+\.(?:md|toml))`")
BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?```python\n(.*?)```", re.DOTALL)
#: Modules with errors of their own, beside ``lifecycle.errors``.
WITH_ERRORS = (
    "lifecycle.memory.room",
    "lifecycle.memory.hook_modes",
    "lifecycle.workspaces",
    "lifecycle.render.images",
    "lifecycle.checker.spin",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    """Each file that a page names is there."""
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))

    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_agents_page_is_short():
    """The page for agents fits on a screen."""
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60


def programs(page: str, marked: str) -> str:
    """The page's programs in order whose mark begins like this; "" is those without one."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return "\n".join(code for mark, code in found if (mark.startswith(marked) if marked else not mark))


@pytest.mark.parametrize(
    ("page", "marked", "told"),
    [("README.md", "needs CUDA", "SWITCHED(ref)"), ("docs/gpu.md", "", "switch: RESIDENT → SWITCHED(ref)")],
)
def test_programs_about_a_gpu_run(page, marked, told):
    """As they are where there is a GPU, else on the CPU; in a process of their own."""
    program = programs(page, marked)
    program = program if torch.cuda.is_available() else program.replace('"cuda"', '"cpu"')
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_the_tree_of_errors_is_whole():
    """``lifecycle.errors`` draws every error that a file of the library defines, below what it derives from."""
    assert lifecycle.errors.__doc__ is not None
    drawn = re.findall(r"^([│├└─ ]*)(\w+)(?: |$)", lifecycle.errors.__doc__.partition("\n\n")[2], re.MULTILINE)
    drawn = {name: len(lines) // 4 for lines, name in drawn if lines or name == "LifecycleError"}
    written = set()
    for file in (ROOT / "lifecycle").rglob("*.py"):
        bases = "|".join(drawn)
        written.update(re.findall(rf"^class (\w+)\((?:{bases})\b", file.read_text(encoding="utf-8"), re.MULTILINE))
    defined = {
        name: value
        for module in ("lifecycle.errors", *WITH_ERRORS)
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and issubclass(value, LifecycleError)
    }

    assert drawn.keys() == {"LifecycleError", *written}
    depths = {
        name: sum(issubclass(base, LifecycleError) for base in error.__mro__) - 1 for name, error in defined.items()
    }
    assert drawn == depths
