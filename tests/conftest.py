"""A small real actor with three tags of different weights, and what each tag must hold, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor, nn

from lifecycle import ActorLifecycle, LifecycleConfig
from lifecycle.memory.arena import ArenaBackend
from lifecycle.world import views_over
from states.resources import VERSION_SLOTS

# Small models are slower on more threads.
torch.set_num_threads(1)

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


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what belongs to a version, under every name it has."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named if name != "table"}


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of an optimizer's state, parameter by parameter."""
    entries = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()} for entry in entries]


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

    def check(self, *, but: tuple[str, ...] = ()) -> None:
        """Every tag can be read, and every readable copy holds what it must, bit for bit."""
        for tag, expected in self.expected.items():
            if tag not in but:
                with self.actor.weights(tag) as weights:
                    assert equal(dict(weights), expected), f"{tag} in {self.actor!r}"
        world, facts = self.actor._world, self.actor.facts
        for part, buffer in world.buffers.items():
            slot = facts.parts[part].slot
            if slot in VERSION_SLOTS:
                copies = views_over(buffer, world.backend.layout(slot))
                holders = [tag for tag, version in facts.tags.items() if part in facts.versions[version].parts.values()]
                for tag in set(holders) - set(but):
                    assert equal(copies, {name: self.expected[tag][name] for name in copies}), f"copy of {tag}"


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


@pytest.fixture(scope="session", autouse=True)
def _libraries_frozen() -> None:
    """The search for tensors that share a storage, at each attach, skips what every imported library has made."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """What was imported is left out of every later search of the process for tensors: a tenth of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture()
def make() -> Callable[..., Rig]:
    """make(tags=..., optimizer=..., host=..., store settings of LifecycleConfig ...) attaches a fresh model."""

    def make(
        tags: tuple[str, ...] = ("ref", "old_actor"),
        optimizer: Callable[[nn.Module], Any] = adam,
        host: Any = "pinned",
        memory: Any = None,
        seed: int = 0,
        **settings: Any,
    ) -> Rig:
        model = Net(seed)
        chosen = optimizer(model)
        config = LifecycleConfig(**settings)
        actor = ActorLifecycle(model, chosen, tags, memory or ArenaBackend(poison=0xCB), host, config)
        return Rig(actor, model, chosen, dict.fromkeys(("actor", *tags), snapshot(model)))

    return make


@pytest.fixture()
def rig(make: Callable[..., Rig]) -> Rig:
    """Three tags with weights of their own, the actor trained last and nowhere but on the device."""
    rig = make(protect_copies=True)
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.tag("old_actor", "actor")
    rig.expected["old_actor"] = rig.expected["actor"]
    rig.train(2)
    return rig
