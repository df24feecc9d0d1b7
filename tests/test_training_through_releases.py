"""Training whose memory is released, poisoned and restored on the way ends with the very bytes of one without."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.memory.arena import ArenaBackend
from lifecycle.memory.base import MemoryBackend
from lifecycle.memory.storage import StorageBackend
from states.resources import SLOT_REGION, Region, Slot

POISON = 0xCB
BACKENDS = {"arena": lambda: ArenaBackend(POISON), "storage": lambda: StorageBackend("cpu", POISON)}


class TinyModel(nn.Module):
    """Tied embeddings, BatchNorm buffers, and a buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.norm = nn.BatchNorm1d(24)
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 24))
        self.register_buffer("half_scale", self.scale[12:])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(self.norm(self.embed(tokens)))) * self.scale
        return self.head(hidden + self.half_scale.mean())


def train(backend: MemoryBackend | None) -> tuple[TinyModel, torch.optim.Optimizer]:
    """Ten AdamW steps on fixed data; with a backend weights go and come back between backward and step, where gradients
    stay, and weights and optimizer state after each step."""
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if backend is not None:
        named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        backend.adopt(Slot.TRAINED, Region.WEIGHTS, named)
    for step in range(10):
        tokens = torch.randint(0, 37, (16,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        if backend is not None:
            release_and_restore(backend, [Slot.TRAINED])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.half_scale.mul_(1.01)  # must be seen through model.scale
        if backend is not None:
            if step == 0:
                state = {f"{i}.{key}": t for i, s in enumerate(optimizer.state.values()) for key, t in s.items()}
                backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, state)
            release_and_restore(backend, [Slot.TRAINED, Slot.OPTIMIZER])
    return model, optimizer


def release_and_restore(backend: MemoryBackend, slots: Iterable[Slot]) -> None:
    store = PinnedStore()
    buffers = {slot: store.allocate(backend.layout(slot).nbytes) for slot in slots}
    for slot, buffer in buffers.items():
        backend.copy_out(slot, buffer)
    for slot in buffers:
        backend.pause(SLOT_REGION[slot])
    for slot in reversed(buffers):
        backend.resume(SLOT_REGION[slot])
    for slot, buffer in buffers.items():
        backend.copy_in(slot, buffer, buffer.nbytes)
        store.free(buffer)


@pytest.mark.parametrize("name", BACKENDS)
def test_training_through_releases_is_bit_identical(name):
    plain, plain_optimizer = train(None)
    model, optimizer = train(BACKENDS[name]())

    for (key, expected), got in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(expected, got), key
    for expected, got in zip(plain_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert model.head.weight is model.embed.weight
    assert set(optimizer.state) == set(model.parameters())
    assert model.half_scale.data_ptr() == model.scale[12:].data_ptr()
