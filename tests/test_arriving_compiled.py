"""Code without hooks and bytes on their way: compiled, scripted and captured."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deep import Deep, close_all, late, poisoned
from rig import TOKENS, equal
from torch import nn
from ways import STREAM

from lifecycle import ActorLifecycle
from lifecycle.adapters.plain import PlainAdapter
from states.frozen import FROZEN

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_all()


@pytest.fixture
def fresh_compiler():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def blocks_in_place(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "the model": lambda model: torch.compile(model, backend="eager"),
    "a function": lambda model: torch.compile(lambda tokens: model(tokens), backend="eager"),
    "in place": in_place,
    "each block": blocks_in_place,
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("way", "first"),
    # a function that was traced before hooks were on calls none
    [pair for pair in product(COMPILED, ("traced", "attached", "woken")) if pair != ("a function", "traced")],
)
@STREAM
def test_compiled_code_reads_no_poison(way, first, stream):
    """Whether it was traced before it was attached, before the wake, or after; but see [Note: compiled models]."""
    model = Deep()
    want = model(TOKENS).detach()
    compiled = COMPILED[way](model) if first == "traced" else None
    if compiled is not None:
        with torch.no_grad():
            assert torch.allclose(compiled(TOKENS), want)
    with ActorLifecycle(model, None, (), late(), "pinned", machine=FROZEN) as actor, torch.no_grad():
        if first == "attached":
            compiled = COMPILED[way](model)
        if compiled is not None:
            want = compiled(TOKENS)
        for _ in range(2):
            actor.sleep()
            actor.wake_up(stream=stream)
            compiled = COMPILED[way](model) if compiled is None else compiled
            assert torch.allclose(compiled(TOKENS), want)
            assert torch.allclose(compiled(TOKENS), want)


@pytest.mark.usefixtures("fresh_compiler")
@STREAM
def test_what_was_attached_is_compiled(stream):
    """The wrapper that torch.compile() returns, attached itself."""
    model = torch.compile(Deep(), backend="eager")
    with ActorLifecycle(model, None, (), late(), "pinned", machine=FROZEN) as actor, torch.no_grad():
        want = model(TOKENS)
        for _ in range(2):
            actor.sleep()
            actor.wake_up(stream=stream)
            assert equal(model(TOKENS), want)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiler_keeps_no_hooks():
    """What it was told to leave alone it holds for ever: nothing of a model or its actor is in that."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ActorLifecycle(model, None, (), late(), "pinned", machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=True)
        model(torch.ones(1, 4))
        hooks = weakref.ref(actor._world.adapter._hooks)
    del model, actor
    gc.collect()
    assert hooks() is None


UNIMPORTED = """
import sys, torch
from deep import Deep, late
from rig import TOKENS
from lifecycle import ActorLifecycle
from states.frozen import FROZEN
model = Deep()
actor = ActorLifecycle(model, None, (), late(), "pinned", machine=FROZEN)
with torch.no_grad():
    want = model(TOKENS)
    actor.sleep()
    actor.wake_up(stream=%r)
    sys.stdout.write("late " if "torch._dynamo" in sys.modules else "early ")
    got = torch.compile(%s, backend="eager")(TOKENS)
    sys.stdout.write("same" if torch.allclose(got, want) else "different")
"""


@pytest.mark.slow
@STREAM
@pytest.mark.parametrize("what", ["model", "lambda tokens: model(tokens)"])
def test_a_compiler_that_came_after_the_wake(what, stream):
    """It was not there when the wake put the hooks on."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    script = UNIMPORTED % (stream, what)
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "early same", run.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_not_streamed():
    """Their code calls no hooks: everything is behind the caller's stream, and none waits for a block."""
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Tanh()), nn.Linear(8, 8))
    want = model(torch.ones(2, 8))
    for call in (lambda: model(torch.ones(2, 8)), lambda: model.state_dict() and model(torch.ones(2, 8))):
        with ActorLifecycle(model, None, (), late(), "pinned", machine=FROZEN) as actor:
            actor.sleep()
            actor.wake_up(stream=True)
            assert actor.state.arriving
            assert equal(call(), want)


class WithGraphs(PlainAdapter):
    """Says that graphs were captured."""

    def graphs_captured(self) -> bool:
        return True

    def why_graphs(self) -> str:
        return "as asked"


def test_captured_graphs_are_not_streamed():
    """A graph replays without hooks: nothing is left to a block's."""
    model = Deep()
    want = model(TOKENS)
    adapter = WithGraphs(model)
    with ActorLifecycle(model, None, (), late(), "pinned", adapter=adapter, machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=True)
        assert poisoned(model.embed)  # the first block was not waited for, as nothing is streamed
        order = model.layers[2]._forward_pre_hooks
        actor.memory.land()  # what the device does by itself before the graph replays
        assert not poisoned(model.layers[2])
        assert order
        assert equal(model(TOKENS), want)
