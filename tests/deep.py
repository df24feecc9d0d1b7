"""A model of blocks on memory where bytes are late: what tests of arrivals and exchanges share."""

from __future__ import annotations

from typing import Any

import torch
from rig import Rig, make_rig, moments, snapshot
from torch import Tensor, nn
from torch.nn import functional

from lifecycle import controller
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.late import LateArena

POISON, LATE = 0xCB, 0xA5
_made: list[Rig] = []


class Layer(nn.Module):
    """An attention that reads a child's weights, and one of its own that does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        seen = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.frozen(torch.tanh(functional.linear(seen, self.inner.weight, self.inner.bias)))


class Deep(nn.Module):
    """Layers between an embedding and a head that is tied to it."""

    def __init__(self, seed: int = 0, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.randn(8))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.bias
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def load(rig: Rig, tag: str, seed: int) -> None:
    """Other weights of the same kind for the tag."""
    torch.manual_seed(seed)
    weights = {name: torch.randn_like(tensor) for name, tensor in rig.model.state_dict().items()}
    if "head.weight" in weights:
        weights["head.weight"] = weights["embed.weight"]
    with rig.actor.loading(tag):
        rig.model.load_state_dict(weights)
        rig.expected[tag] = snapshot(rig.model)


def busy(memory: ArenaBackend | None = None, model: nn.Module | None = None, **settings: Any) -> Rig:
    """Actor and ref with weights and the actor with optimizer state of its own, the actor nowhere but on the device."""
    rig = make_rig(tags=("ref", "old"), memory=memory or late(), model=Deep() if model is None else model, **settings)
    _made.append(rig)
    load(rig, "ref", 1)
    rig.train(2)
    return rig


def late() -> LateArena:
    return LateArena(POISON, LATE)


def arena(rig: Rig) -> LateArena:
    memory = rig.actor.memory
    assert isinstance(memory, LateArena)
    return memory


def poisoned(module: nn.Module) -> bool:
    """Whether all of its parameters are on their way, and none of the bytes has come. Neither: an error."""
    there = {set(p.detach().reshape(-1).view(torch.uint8).tolist()) == {LATE} for p in module.parameters()}
    assert len(there) == 1, "some have come and some have not"
    return there.pop()


def contents(rig: Rig) -> dict[str, Any]:
    """Everything that the tags, the model and the optimizer hold, once it has come."""
    found: dict[str, Any] = {} if rig.actor.state.name == "CLOSED" else {t: rig.held(t) for t in rig.actor.tags}
    if rig.actor.state.name in ("RESIDENT", "CLOSED"):
        found["optimizer"] = moments(rig.optimizer) if rig.optimizer else []
    if rig.actor.state.name != "ASLEEP":
        found["model"] = snapshot(rig.model)
    return found


def close_all() -> None:
    """Whatever a test has left attached, in whatever state: the next one looks at what is left in the process."""
    for actor in tuple(controller._ATTACHED):
        actor.close(force=True)
    _made.clear()
