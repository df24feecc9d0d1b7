"""A small actor on real memory with something of everything, and ways to bring it into every state."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from lifecycle import ActorLifecycle, LifecycleConfig
from lifecycle.memory.arena import ArenaBackend
from lifecycle.sync.session import SyncSession
from lifecycle.testing.busy import BusyAdapter
from lifecycle.testing.engines import FakeEngine
from states.frozen import FROZEN

TAGS = ("ref", "old_actor")


class Net(torch.nn.Module):
    """Tied weights, a view, a frozen layer, batch statistics, a table that no checkpoint holds, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.body = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(8), persistent=False)
        self.scale = torch.full((8,), 1.5)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens)) * self.table * self.scale
        return self.head(self.frozen(torch.tanh(self.body(hidden))))


TOKENS = torch.arange(16)


def make_actor(config=None, host="pinned", tags=TAGS, seed=0, **options):
    """(actor, model, optimizer): attached, nothing trained yet."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    adapter = BusyAdapter(model, optimizer, extra=["scale"])
    memory = options.pop("memory", None) or ArenaBackend(poison=0xCB)
    config = config or LifecycleConfig(protect_copies=True)
    actor = ActorLifecycle(None, tags=tags, memory=memory, host=host, config=config, adapter=adapter, **options)
    return actor, model, optimizer


def make_frozen(host="pinned", tags=TAGS, seed=0, memory=None):
    """(actor, model) of a machine that does not train: tags with weights of their own, 'actor' on the device alone."""
    torch.manual_seed(seed)
    model = Net()
    adapter = BusyAdapter(model, None, extra=["scale"])
    config = LifecycleConfig(protect_copies=True)
    memory = memory or ArenaBackend(poison=0xCB)
    actor = ActorLifecycle(None, tags=tags, memory=memory, host=host, config=config, adapter=adapter, machine=FROZEN)
    model.eval()
    for number, tag in enumerate((*tags, "actor"), start=1):
        load_noise(actor, model, tag, number)
    model.body.weight.grad = torch.ones(8, 8)  # an owner outside left it
    adapter.quantise()
    return actor, model


def step(model, optimizer):
    optimizer.zero_grad()
    model(TOKENS).square().mean().backward()
    optimizer.step()


def train(actor, model, optimizer, steps=1):
    with actor.training():
        for _ in range(steps):
            step(model, optimizer)


def load_noise(actor, model, tag, seed):
    """Other weights for a tag, from outside."""
    generator = torch.Generator().manual_seed(seed)
    with actor.loading(tag), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def make_busy(actor, model, optimizer):
    """Three tags with weights of their own, a trained actor without copies, gradients, workspaces, optimizer state."""
    load_noise(actor, model, "ref", 1)
    train(actor, model, optimizer)
    actor.tag("old_actor", "actor")
    train(actor, model, optimizer, 2)
    actor._world.adapter.quantise()


def weights_of(actor):
    """Every tag's weights, cloned from whatever copy is readable."""
    found = {}
    for tag in actor.tags:
        with actor.weights(tag) as weights:
            found[tag] = {name: tensor.clone() for name, tensor in weights.items()}
    return found


def assert_equal_weights(expected, got):
    assert expected.keys() == got.keys()
    for tag, weights in expected.items():
        assert weights.keys() == got[tag].keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, got[tag][name]), (tag, name)


def live_weights(actor):
    """What the device holds now, by name."""
    world = actor._world
    return {
        name: tensor.clone()
        for slot in ("frozen", "trained", "state")
        for name, tensor in world.backend.views(slot).items()
    }


def engine(**options):
    return FakeEngine(transports=("in_process",), **options)


@contextmanager
def session(actor, one=None):
    """What sync() does around its events, for tests that fire them one by one."""
    one = one or engine()
    actor._world.session = SyncSession({one.name: one}, actor._world.store.shared, "abort")
    try:
        yield {"tag": "actor", "engines": (one.name,), "host_copy": False}
    finally:
        actor._world.session = None
