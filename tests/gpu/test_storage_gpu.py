"""The storage backend on a GPU: memory really goes back to the driver, and comes back with the right bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.memory import moves
from lifecycle.memory.storage import StorageBackend
from lifecycle.testing.contracts import MemoryBackendContract
from states.resources import Region, Slot

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LONG = 400_000_000  # clock cycles, about 0.2 s


class TestStorageOnCuda(MemoryBackendContract):
    device = "cuda"

    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite's tensors are a few bytes each: an exchange of them is to have several chunks."""
        monkeypatch.setattr(moves, "CHUNK", moves.BLOCK)

    def make(self) -> StorageBackend:
        return StorageBackend(poison=0xCB)


@pytest.fixture
def store() -> Iterator[PinnedStore]:
    store = PinnedStore()
    yield store
    torch.cuda.synchronize()
    store.close()


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    torch.cuda.empty_cache()


def free() -> int:
    return int(torch.cuda.mem_get_info()[0])


def adopted(tensors: Mapping[str, torch.Tensor], poison: int | None = None) -> StorageBackend:
    backend = StorageBackend(poison=poison)
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
    return backend


def bytes_in_segments_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the allocator's segments in which nothing else is allocated."""
    mine = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    total = 0
    for segment in torch.cuda.memory_snapshot():
        taken = {block["address"] for block in segment["blocks"] if block["state"] != "inactive"}
        if taken and taken <= mine:
            total += segment["total_size"]
    return total


def test_memory_goes_back_to_the_driver():
    """What a pause gives back, and a resume takes, is what the allocator's segments say, within 64 MiB."""
    sizes = [40 * MIB, 3 * MIB, 21 * MIB + 5, 700, 1] * 8
    weights = {str(number): torch.ones(size, dtype=torch.uint8, device="cuda") for number, size in enumerate(sizes)}
    backend = adopted(weights)
    predicted, before = bytes_in_segments_of(weights), free()
    assert predicted > 450 * MIB

    backend.pause(Region.WEIGHTS)

    assert abs(free() - before - predicted) <= 64 * MIB
    backend.resume(Region.WEIGHTS)
    assert abs(free() - before) <= 64 * MIB


class Model(nn.Module):
    """Tied weights, a view of a buffer, odd sizes, and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20011, 1025)
        self.layers = nn.ModuleList(nn.Linear(1025, 1025) for _ in range(4))
        self.head = nn.Linear(1025, 20011, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 1025))
        self.register_buffer("half_scale", self.scale[512:])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden)) * self.scale
        return self.head(hidden + self.half_scale.mean())


def test_twenty_cycles_of_two_regions(store: PinnedStore):
    """In random order, poisoned: every byte, tie, view and gradient survives, and memory stays flat."""
    torch.manual_seed(0)
    model = Model().cuda()
    model.half_scale = model.scale[512:]  # .cuda() moved the buffers one by one
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(64, device="cuda")
    model(tokens).square().mean().backward()
    optimizer.step()
    weights = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    state = {f"{n}.{key}": t for n, s in enumerate(optimizer.state.values()) for key, t in s.items() if t.is_cuda}
    slots = {Slot.TRAINED: (Region.WEIGHTS, weights), Slot.OPTIMIZER: (Region.OPTIMIZER, state)}
    backend = StorageBackend(poison=0xCB)
    for slot, (region, tensors) in slots.items():
        backend.adopt(slot, region, tensors)
    before = {slot: {name: t.detach().cpu() for name, t in tensors.items()} for slot, (_, tensors) in slots.items()}
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    logits = model(tokens).detach().clone()
    buffers = {slot: store.allocate(backend.layout(slot).nbytes) for slot in slots}
    for slot, buffer in buffers.items():
        backend.copy_out(slot, buffer)
    order = random.Random(0)
    allocated, available = torch.cuda.memory_allocated(), []

    for _ in range(20):
        chosen = order.sample(list(slots), order.randint(1, 2))
        for slot in chosen:
            backend.pause(slots[slot][0])
        for slot in order.sample(chosen, len(chosen)):
            backend.resume(slots[slot][0])
            backend.copy_in(slot, buffers[slot], buffers[slot].nbytes)
        available.append(free())

    for slot, (_, tensors) in slots.items():
        assert [name for name, t in tensors.items() if not torch.equal(t.detach().cpu(), before[slot][name])] == []
    assert torch.equal(model(tokens), logits)
    assert model.head.weight is model.embed.weight
    assert model.half_scale.data_ptr() == model.scale[512:].data_ptr()
    assert all(torch.equal(parameter.grad, grads[name]) for name, parameter in model.named_parameters())
    assert torch.cuda.memory_allocated() <= allocated + MIB
    assert max(available) - min(available) <= 64 * MIB
    model(tokens).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.embed.weight.cpu(), before[Slot.TRAINED]["embed.weight"])


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_values_under_the_callers_stream(store: PinnedStore, own_stream: bool):
    """Resume, restore and a consumer launched right behind it, on one stream: it sees the bytes, not the poison."""
    weight = torch.arange(32 * MIB, device="cuda", dtype=torch.int32)
    expected = weight.clone()
    backend = adopted({"weight": weight}, poison=0xCB)
    buffer = store.allocate(backend.layout(Slot.TRAINED).nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()

    for _ in range(3):
        backend.pause(Region.WEIGHTS)
        with torch.cuda.stream(stream):
            backend.resume(Region.WEIGHTS)
            backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)
            seen = weight + 1
        on_default = weight + 1  # complete on return: for every stream
        torch.cuda.synchronize()
        assert torch.equal(seen, expected + 1)
        assert torch.equal(on_default, expected + 1)
        del seen, on_default


def test_poison_marks_what_was_not_restored():
    """What comes back is the poison byte in every byte, however the memory was used before."""
    weight = torch.zeros(33 * MIB + 3, dtype=torch.uint8, device="cuda")
    small = torch.zeros(5, dtype=torch.uint8, device="cuda")
    backend = adopted({"weight": weight, "small": small}, poison=0xCB)

    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)

    assert weight.unique().tolist() == [0xCB]
    assert small.unique().tolist() == [0xCB]


def test_a_pause_waits_for_running_kernels():
    """Memory that a launch on another stream still reads is given back behind it."""
    weight = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda")
    backend = adopted({"weight": weight}, poison=0xCB)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        seen = weight.clone()
    backend.pause(Region.WEIGHTS)

    assert stream.query()
    taken = torch.full((64 * MIB,), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [5]
    assert taken.unique().tolist() == [9]


def test_no_room_to_resume(store: PinnedStore):
    """Where memory lacks for some storages none is kept; the region stays paused, and comes back when there is room."""
    weights = {str(number): torch.full((64 * MIB,), number, dtype=torch.uint8, device="cuda") for number in range(4)}
    backend = adopted(weights)
    buffer = store.allocate(backend.layout(Slot.TRAINED).nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    backend.pause(Region.WEIGHTS)
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]

    torch.cuda.set_per_process_memory_fraction((reserved + 150 * MIB) / total)
    try:
        with pytest.raises(MemoryError, match="no room for region weights"):
            backend.resume(Region.WEIGHTS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert Region.WEIGHTS not in backend.resident()
    assert {weight.untyped_storage().nbytes() for weight in weights.values()} == {0}
    assert torch.cuda.memory_reserved() == reserved
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)
    assert [weight.unique().tolist() for weight in weights.values()] == [[0], [1], [2], [3]]


def test_available_is_what_a_resume_could_take():
    """Memory that others hold is missing from it; what torch's allocator only caches is not."""
    weight = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    backend = adopted({"weight": weight})
    backend.pause(Region.WEIGHTS)
    assert backend.available() >= 256 * MIB

    others = torch.empty(free() - 128 * MIB, dtype=torch.uint8, device="cuda")
    assert backend.available() <= 160 * MIB
    size = others.numel()
    del others
    assert backend.available() >= size

    backend.resume(Region.WEIGHTS)
    assert weight.untyped_storage().nbytes() == 256 * MIB


def test_collect_tells_what_it_gave_back():
    """Dropped memory goes back to the driver, by the bytes that collect returns."""
    backend = StorageBackend()
    dropped = torch.ones(128 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = free()
    del dropped

    assert backend.collect() >= 128 * MIB
    assert free() >= before + 128 * MIB - MIB


def test_holders_are_the_others():
    """What was adopted is not named as holding memory beside it, resident or released; another tensor is."""
    mine = torch.zeros(2 * MIB + 7, dtype=torch.uint8, device="cuda")
    other = torch.zeros(3 * MIB + 7, dtype=torch.uint8, device="cuda")
    backend = adopted({"mine": mine})

    for _ in range(2):
        told = {holder.what: holder.nbytes for holder in backend.holders()}
        assert [nbytes for what, nbytes in told.items() if f"({other.numel()},)" in what] == [other.numel()]
        assert not any(f"({mine.numel()},)" in what for what in told)
        if Region.WEIGHTS in backend.resident():
            backend.pause(Region.WEIGHTS)
