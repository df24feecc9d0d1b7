"""Every way to the bytes of an actor that has just been woken: what tests of arrivals share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep import Deep
from rig import TOKENS, Rig, snapshot, striking

from lifecycle.errors import EffectFailed
from lifecycle.testing.trouble import CopyingEngine

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["ordered", "streamed"])


def wake(rig: Rig, stream: bool, tag: str = "actor") -> Rig:
    """Asleep, and woken: bytes are on their way."""
    if rig.actor.state.name != "ASLEEP":
        rig.actor.sleep()
    rig.actor.wake_up(tag, stream=stream)
    assert rig.actor.state.arriving
    return rig


def step(rig: Rig) -> Any:
    for parameter in rig.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    rig.optimizer.step()


def scope(block: Callable[[Rig], Any]) -> Callable[[Rig], Any]:
    def inside(rig: Rig) -> Any:
        with block(rig):
            return snapshot(rig.model)

    return inside


def read(tag: str) -> Callable[[Rig], Any]:
    return lambda rig: rig.held(tag)


def train(rig: Rig) -> Any:
    rig.train(2)


def sync(rig: Rig) -> Any:
    engine = CopyingEngine(transports=("in_process",))
    rig.actor.sync(engine)
    return engine.weights


def load_into(rig: Rig) -> Any:
    torch.manual_seed(7)
    rig.model.load_state_dict({name: torch.randn_like(t) for name, t in Deep(3).state_dict().items()})
    rig.actor.adopt()


def change_in_a_load(rig: Rig) -> Any:
    """Reads what is there to make something else of it."""
    with rig.actor.loading("old"), torch.no_grad():
        for tensor in rig.model.parameters():
            tensor.mul_(2)


def fault(rig: Rig) -> Any:
    """Something fails while bytes are on their way, and recover() makes it whole."""

    def blow() -> None:
        raise ArithmeticError("a bug")

    if rig.actor.state.arriving:
        with striking(rig.actor, blow, "await_weights"), pytest.raises(EffectFailed):
            rig.actor.switch("ref")
        assert rig.state == "FAULTED(await_weights)"
        rig.actor.recover()


PATHS: dict[str, Callable[[Rig], Any]] = {
    "root": lambda rig: rig.model(TOKENS),
    "submodule": lambda rig: rig.model.embed(TOKENS),
    "block": lambda rig: rig.model.layers[2](torch.ones(1, 2, 8)),
    "part of a block": lambda rig: rig.model.layers[1].inner(torch.ones(2, 8)),
    "after the layers": lambda rig: rig.model.norm(torch.ones(2, 8)),
    "state_dict": lambda rig: {name: t.clone() for name, t in rig.model.state_dict().items()},
    "state_dict of a part": lambda rig: {name: t.clone() for name, t in rig.model.layers[1].state_dict().items()},
    "load_state_dict": load_into,
    "weights": read("actor"),
    "weights of another": read("ref"),
    "using": scope(lambda rig: rig.actor.using("ref")),
    "hold": scope(lambda rig: rig.actor.hold()),
    "sync": sync,
    "sleep": lambda rig: rig.actor.sleep(),
    "switch": lambda rig: rig.actor.switch("ref"),
    "switch and back": lambda rig: (rig.actor.switch("ref"), rig.actor.switch("actor")),
    "backward": lambda rig: rig.backward(),
    "step": step,
    "optimizer.state_dict": lambda rig: rig.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    "optimizer.load_state_dict": lambda rig: rig.optimizer.load_state_dict(rig.optimizer.state_dict()),
    "training": train,
    "loading": change_in_a_load,
    "adopt": lambda rig: rig.actor.adopt(),
    "tag": lambda rig: rig.actor.tag("ref", "actor"),
    "discard_grads": lambda rig: rig.actor.discard_grads(),
    "recover": fault,
    "close": lambda rig: rig.actor.close(),
}
