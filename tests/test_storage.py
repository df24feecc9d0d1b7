"""The storage backend, on the CPU: storages are really released, and really restored, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from lifecycle.errors import ManifestError
from lifecycle.fingerprint import fingerprint
from lifecycle.memory.base import Incoming
from lifecycle.memory.storage import StorageBackend
from lifecycle.testing.contracts import MemoryBackendContract
from lifecycle.testing.fakes import FakeStore
from states.resources import Region, Slot

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


class TestStorage(MemoryBackendContract):
    def make(self) -> StorageBackend:
        return StorageBackend("cpu")


class TestPoisonedStorage(MemoryBackendContract):
    def make(self) -> StorageBackend:
        return StorageBackend("cpu", poison=0xCB)


def adopt(tensors: dict[str, torch.Tensor], poison: int | None = None) -> StorageBackend:
    backend = StorageBackend("cpu", poison)
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
    return backend


def test_memory_is_really_released():
    """Pausing gives 256 MiB back to the system, through views and ties; nothing of the storages is left."""
    base = torch.full((64 * MIB,), 1.0)
    tensors = {"head": base[: 32 * MIB], "tied": base, "rows": base.view(8, -1)}
    backend = adopt(tensors)
    before = psutil.Process().memory_info()

    backend.pause(Region.WEIGHTS)

    after = psutil.Process().memory_info()
    assert (before.rss - before.shared) - (after.rss - after.shared) > 250 * MIB
    assert {tensor.untyped_storage().nbytes() for tensor in tensors.values()} == {0}
    backend.resume(Region.WEIGHTS)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors.values()} == {256 * MIB}


def test_poison_marks_what_was_not_restored():
    """With a poison byte, what comes back is that byte, never the old values by luck."""
    weight = torch.zeros(3000, dtype=torch.uint8)
    backend = adopt({"weight": weight}, poison=0xCB)

    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)

    assert weight.unique().tolist() == [0xCB]


def test_everything_follows_to_new_addresses():
    """After a resume elsewhere, copies, named blocks, exchanges and fingerprints are those of the new memory."""
    weight, other = torch.arange(MIB, dtype=torch.int32), torch.ones(5)
    backend = adopt({"weight": weight, "other": other})
    nbytes = backend.layout(Slot.TRAINED).nbytes
    old, out = FakeStore().allocate(nbytes), FakeStore().allocate(nbytes)
    block = [Incoming(Slot.TRAINED, old, nbytes, frozenset({"weight"}), ("weight",))]
    backend.copy_out(Slot.TRAINED, old)
    expected, place = backend.fingerprints(Slot.TRAINED), weight.data_ptr()
    backend.start_copy_in([block], aside=False)[0].wait()
    backend.exchange(Slot.TRAINED, out, old, nbytes)

    backend.pause(Region.WEIGHTS)
    keeps_the_place = torch.zeros(MIB, dtype=torch.int32)
    backend.resume(Region.WEIGHTS)

    assert place != weight.data_ptr() or keeps_the_place.data_ptr() != place
    weight.zero_()
    other.zero_()
    found = backend.start_copy_in([block], aside=True)[0].wait()
    assert found == {Slot.TRAINED: {"weight": expected["weight"]}}
    assert torch.equal(weight, torch.arange(MIB, dtype=torch.int32))
    assert other.tolist() == [0] * 5
    backend.exchange(Slot.TRAINED, out, old, nbytes)
    assert backend.fingerprints(Slot.TRAINED) == expected
    assert other.tolist() == [1] * 5


def test_all_of_a_storage_goes():
    """A tensor inside a larger storage takes all of it along, and it comes back at its size."""
    small = nn.Parameter(torch.zeros(MIB)[1000:1010])
    backend = adopt({"small": small})

    backend.pause(Region.WEIGHTS)
    assert small.untyped_storage().nbytes() == 0
    backend.resume(Region.WEIGHTS)

    assert small.untyped_storage().nbytes() == 4 * MIB
    assert backend.layout(Slot.TRAINED).nbytes == 64


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(5).share_memory_(),
        lambda: torch.frombuffer(bytearray(20), dtype=torch.float32),
        lambda: torch.from_numpy(torch.ones(5).numpy()),
    ],
    ids=["shared", "foreign", "numpy's"],
)
def test_storages_of_fixed_size_are_refused(make):
    """What could not be taken back is refused by name, and nothing is owned then."""
    good, fixed = torch.ones(5), make()

    with pytest.raises(ManifestError, match="can not be resized") as caught:
        adopt({"good": good, "fixed": fixed})

    assert caught.value.problems == ("fixed",)
    adopt({"good": good})


def test_rebound_tensors_are_noticed():
    """A tensor moved to other memory is refused by name: before any byte is released, and while it is released."""
    weight, other = nn.Parameter(torch.ones(40)), torch.ones(3)
    backend = adopt({"weight": weight, "other": other})
    mine = weight.data
    weight.data = torch.zeros(40)
    for refused in (backend.check, lambda: backend.pause(Region.WEIGHTS)):
        with pytest.raises(ManifestError, match="rebound") as caught:
            refused()
        assert caught.value.problems == ("weight",)
    assert other.tolist() == [1] * 3
    weight.data = mine

    backend.pause(Region.WEIGHTS)
    backend.check()
    other.data = torch.zeros(3)

    with pytest.raises(ManifestError, match="rebound") as caught:
        backend.check()
    assert caught.value.problems == ("other",)


def test_views_inside_a_storage_are_no_strangers_while_released():
    """Where a tensor lies in its storage tells it apart while there is no memory; nothing is taken for rebound."""
    base = torch.arange(100.0)
    backend = adopt({"base": base, "inside": base[50:60]})

    backend.pause(Region.WEIGHTS)

    backend.check()
    backend.resume(Region.WEIGHTS)
    backend.check()


def test_two_actors_can_not_own_the_same_tensor():
    """A tensor of another actor's, also by a view, is refused until its owner forgets it or is gone."""
    weight = torch.ones(5)
    first = adopt({"weight": weight})

    for taken in ({"weight": weight}, {"view": weight[1:]}):
        with pytest.raises(ManifestError, match="already belong to an actor"):
            adopt(taken)

    taken.clear()
    first.forget(Slot.TRAINED)
    second = adopt({"weight": weight})
    del second
    adopt({"weight": weight})


NO_ROOM = """
import resource, psutil, torch
from lifecycle.memory.storage import StorageBackend
from states.resources import Region, Slot

weights = {str(number): torch.full((32 << 20,), 1.0) for number in range(3)}
backend = StorageBackend("cpu")
backend.adopt(Slot.TRAINED, Region.WEIGHTS, weights)
backend.pause(Region.WEIGHTS)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (300 << 20), before[1]))
try:
    backend.resume(Region.WEIGHTS)
except MemoryError as error:
    print("refused:", str(error).split(".")[0])
print("sizes:", {weight.untyped_storage().nbytes() for weight in weights.values()})
print("resident:", Region.WEIGHTS in backend.resident())
resource.setrlimit(resource.RLIMIT_AS, before)
backend.resume(Region.WEIGHTS)
print("sizes:", {weight.untyped_storage().nbytes() for weight in weights.values()})
"""


def test_no_room_to_resume():
    """Where memory lacks for some storages, none is kept, the region stays paused, and it comes back when there is."""
    done = subprocess.run([sys.executable, "-c", NO_ROOM], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.splitlines() == [
        f"refused: no room for region weights: {3 * 128 * MIB} bytes needed",
        "sizes: {0}",
        "resident: False",
        f"sizes: {{{128 * MIB}}}",
    ], done.stderr


class OnTwoDevices(StorageBackend):
    """As if every region needed these bytes of two devices, with these free."""

    free = (1000, 1000)
    needs = {0: 64, 1: 64}  # noqa: RUF012

    def _needed(self, region: Region) -> dict[int, int]:
        return self.needs

    def _free_bytes(self, index: int) -> int:
        return self.free[index]


@pytest.mark.parametrize(
    ("free", "needs", "fits"),
    [((64, 64), {0: 64, 1: 64}, True), ((63, 1000), {0: 64, 1: 64}, False), ((1000, 10), {0: 118, 1: 10}, True)],
)
def test_the_fullest_device_decides_what_is_available(free: tuple[int, int], needs: dict[int, int], fits: bool):
    """A region of 128 bytes fits exactly where each device has room for its own share of it."""
    backend = OnTwoDevices("cpu")
    backend.free, backend.needs = free, needs
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": torch.zeros(128, dtype=torch.uint8)})
    backend.pause(Region.WEIGHTS)

    assert (backend.available() >= backend.layout(Slot.TRAINED).nbytes) is fits


def test_available_tells_of_the_machine_where_nothing_is_owned():
    """Without regions it is what the process can take at all."""
    assert 0 < StorageBackend("cpu").available() <= psutil.virtual_memory().total


def test_holders_are_the_others():
    """What the actor owns is not named as holding memory beside it; another tensor is, with its size."""
    mine, other = torch.zeros(12_347), torch.zeros(12_343)
    backend = adopt({"mine": mine})

    told = {holder.what: holder.nbytes for holder in backend.holders()}

    assert [nbytes for what, nbytes in told.items() if "(12343,)" in what] == [other.nbytes]
    assert not any("(12347,)" in what for what in told)


def test_adopting_under_inference_mode_gives_normal_tensors():
    """Whatever mode the caller is in, what was adopted can still be restored and trained outside it."""
    weight = nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        backend = adopt({"weight": weight})
        buffer = FakeStore().allocate(64)
        backend.copy_out(Slot.TRAINED, buffer)
        backend.exchange(Slot.TRAINED, FakeStore().allocate(64), buffer, 64)
    backend.copy_in(Slot.TRAINED, buffer, 64)

    weight.sum().backward()
    with torch.no_grad():
        weight.add_(weight.grad)
    assert weight.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_move_as_bytes(dtype: torch.dtype):
    """Odd dtypes come through release and restore with their exact bytes."""
    raw = torch.randint(0, 2, (3 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.clone().view(dtype)
    content = fingerprint(tensor)
    backend = adopt({"tensor": tensor}, poison=0xCB)
    buffer = FakeStore().allocate(64)
    backend.copy_out(Slot.TRAINED, buffer)
    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, 64)

    assert torch.equal(tensor.view(torch.uint8), raw)
    assert backend.fingerprints(Slot.TRAINED) == {"tensor": content}
