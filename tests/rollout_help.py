"""What the tests of the local engine share: a small model, an engine in a process per file, and waiting."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lifecycle.errors import EngineError
from lifecycle.rollout.local import LocalEngine
from lifecycle.testing.engine_contract import shared_memory_update, take

PROMPTS = [[1, 5, 9, 200], [7], [3, 3, 250, 17, 90, 4]]
LONG = {"max_new_tokens": 2000, "eos_token_id": None}


def llama(**changes):
    # The large vocabulary makes the weights large enough to be seen in the process's memory.
    shape = {
        "vocab_size": 32768,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**shape, **changes})


@pytest.fixture(name="one_thread", scope="module")
def _one_thread():
    """The engine's threads would be in the way of ours, and the other way round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="trainer", scope="module")
def _trainer(one_thread):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(llama()).eval()


@pytest.fixture(name="process", scope="module")
def _process(one_thread):
    with LocalEngine(llama(), threads=1) as engine:
        yield engine


@pytest.fixture(name="engine")
def _engine(process):
    """The shared process, alive, with no version, resident and not paused."""
    if not process.alive:
        process.restart()
    process.abort_update()
    process.resume()
    process.continue_generation()
    return process


@pytest.fixture(name="ready")
def _ready(engine, trainer):
    """The same with the trainer's weights as version 1."""
    with shared_memory_update(trainer.state_dict(), 1) as sent:
        take(engine, *sent)
    return engine


def greedy(model, prompts, count):
    """The trainer's own answer for one left-padded batch."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    return output[:, longest:].tolist()


@contextmanager
def in_background(function, *arguments, **options):
    """Runs the call in another thread; the list gets its result or error, and is complete after the block."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments, **options))
        except EngineError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join()


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def running(engine):
    return engine.status()["requests"]["running"] == 1
