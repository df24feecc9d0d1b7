"""A small real actor on poisoned memory, and what each of its tags must hold, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from attrs import define, field
from torch import Tensor, nn

from lifecycle import ActorLifecycle, LifecycleConfig
from lifecycle.memory.arena import ArenaBackend
from lifecycle.views import views_over
from states.resources import VERSION_SLOTS

TOKENS = torch.arange(12).view(3, 4)


class Net(nn.Module):
    """Frozen and trained weights, a tie, a buffer that is saved and one that is not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.randn(8))
        self.register_buffer("table", torch.randn(8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) * self.table + self.bias
        return self.head(self.frozen(torch.tanh(self.body(hidden))))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what belongs to a version, under every name it has."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named if name != "table"}


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of an optimizer's state, parameter by parameter."""
    with torch.no_grad():
        return [copy.deepcopy(entry) for entry in optimizer.state.values()]


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, through lists and dictionaries."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


@define
class Rig:
    """An actor, its model and optimizer, and what every tag must hold."""

    actor: ActorLifecycle
    model: nn.Module
    optimizer: Any
    expected: dict[str, dict[str, Tensor]] = field(factory=dict)

    @property
    def state(self) -> str:
        return str(self.actor.state)

    def backward(self) -> None:
        self.model(TOKENS).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def train(self, steps: int = 1) -> None:
        with self.actor.training():
            for _ in range(steps):
                self.step()
        self.expected["actor"] = snapshot(self.model)

    def load(self, tag: str, seed: int) -> None:
        """Other weights for the tag, from outside."""
        with self.actor.loading(tag):
            self.model.load_state_dict(Net(seed).state_dict())
            self.expected[tag] = snapshot(self.model)

    def held(self, tag: str) -> dict[str, Tensor]:
        with self.actor.weights(tag) as weights:
            return {name: tensor.clone() for name, tensor in weights.items()}

    def check(self, *, but: tuple[str, ...] = ()) -> None:
        """Every tag can be read, every readable copy holds what it must, and the model shows what the state says."""
        for tag in self.expected.keys() - set(but):
            assert equal(self.held(tag), self.expected[tag]), f"{tag} in {self.actor!r}"
        world, facts = self.actor._world, self.actor.facts
        for part, buffer in world.buffers.items():
            slot = facts.parts[part].slot
            if slot in VERSION_SLOTS:
                copies = views_over(buffer, world.backend.layout(slot))
                for tag, version in facts.tags.items():
                    if part in facts.versions[version].parts.values() and tag not in but:
                        assert equal(copies, {name: self.expected[tag][name] for name in copies}), f"copy of {tag}"
        shown = {"RESIDENT": "actor", "SWITCHED": self.actor.state.tag}.get(self.actor.state.name)
        if shown is not None and shown not in but and facts.load is None:
            assert equal(snapshot(self.model), self.expected[shown]), f"the model is not {shown}"


def make_rig(
    tags: tuple[str, ...] = ("ref", "old_actor"),
    optimizer: Callable[[nn.Module], Any] = adam,
    host: Any = "pinned",
    memory: Any = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Rig:
    """A fresh model, attached; ``settings`` are LifecycleConfig's."""
    model = Net() if model is None else model
    chosen = optimizer(model)
    config = LifecycleConfig(**settings)
    actor = ActorLifecycle(model, chosen, tags, memory or ArenaBackend(poison=0xCB), host, config)
    return Rig(actor, model, chosen, dict.fromkeys(("actor", *tags), snapshot(model)))


def make_busy(rig: Rig) -> Rig:
    """Three tags with weights of their own, the actor trained last and nowhere but on the device."""
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.tag("old_actor", "actor")
    rig.expected["old_actor"] = rig.expected["actor"]
    rig.train(2)
    return rig


@define
class Strike:
    """What happened at the struck action: (event, effect), or None if the event had no such action."""

    at: tuple[str, str] | None = None
    seen: int = 0


@contextmanager
def striking(
    actor: ActorLifecycle, blow: Callable[[], Any], at: int | str, when: Literal["before", "after"] = "before"
) -> Iterator[Strike]:
    """Inside, ``blow`` is called once: at the action with this number, or at the first one of this effect."""
    strike, world = Strike(), actor._world
    perform = world.perform

    def struck(action: Any, facts: Any, call: Any) -> Any:
        number, strike.seen = strike.seen, strike.seen + 1
        assert actor.moving is not None
        if strike.at is not None or at not in (number, actor.moving[1]):
            return perform(action, facts, call)
        strike.at = actor.moving
        result = perform(action, facts, call) if when == "after" else None
        blow()
        return perform(action, facts, call) if when == "before" else result

    world.perform = struck
    try:
        yield strike
    finally:
        with suppress(AttributeError):
            del world.perform
