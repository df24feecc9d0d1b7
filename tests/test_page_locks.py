"""Page locks and NUMA nodes of host buffers: with a stand-in for CUDA and made-up machines."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lifecycle.bench import pinning
from lifecycle.errors import LifecycleError
from lifecycle.hoststore import locking, numa, pinned, shared
from lifecycle.hoststore.base import tensor_over
from lifecycle.hoststore.disk import DiskStore
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.hoststore.shared import SharedStore
from lifecycle.memory import pages

MIB = 1 << 20
Store = PinnedStore | SharedStore
both = pytest.mark.parametrize("kind", [PinnedStore, SharedStore])


@pytest.fixture(autouse=True)
def _one_node(monkeypatch: pytest.MonkeyPatch):
    """Whatever machine this is, its own nodes give no notes."""
    for module in (pinned, shared):
        monkeypatch.setattr(module, "move_near", lambda _: None)


class FakeCudaRuntime:
    """Records registrations, and whether the pages were there and writable then; answers with CUDA error ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.asked = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert address not in self.registered, "registered twice"
        self.asked += 1
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert permissions(address).startswith("rw"), "unregistered while read-only, or unmapped"
        del self.registered[address]
        return 0


def permissions(address: int) -> str:
    """How the area with this address is mapped; empty if it is not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, how, *_ = line.split()
        first, last = (int(end, 16) for end in area.split("-"))
        if first <= address < last:
            return how
    return ""


@both
def test_memory_is_page_locked_where_a_gpu_is_used(kind: type[Store]):
    """With a CUDA runtime every buffer is registered once, at its address for all its bytes, until it is freed."""
    runtime = FakeCudaRuntime()
    store = kind(lambda: runtime)
    buffer, other = store.allocate(10_000), store.allocate(1)

    assert buffer.locked
    assert runtime.registered == {tensor_over(buffer).data_ptr(): 10_000, tensor_over(other).data_ptr(): 1}
    store.free(other)
    assert runtime.registered == {tensor_over(buffer).data_ptr(): 10_000}
    store.close()
    assert runtime.registered == {}
    assert runtime.asked == 2
    assert not [note for note in store.notes() if "page-locked" in note]


@both
def test_pages_are_there_before_and_until_after(kind: type[Store]):
    """Pages are populated when they are locked, and still hold their bytes when they are unlocked."""
    seen = []

    class Looking(FakeCudaRuntime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            seen.append(resident(address))
            return super().cudaHostRegister(address, nbytes, flags)

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            seen.append(buffer.memory[:3])
            return super().cudaHostUnregister(address)

    runtime = Looking()
    store = kind(lambda: runtime)
    buffer = store.allocate(5 * MIB)
    buffer.memory[:3] = b"abc"
    store.free(buffer)

    assert seen[0] >= 5 * MIB
    assert seen[1:] == [b"abc"]


def resident(address: int) -> int:
    """Resident bytes of the mapped area with this address, and of those that belong to the same mapping behind it."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= address < last or (inside and first < address + 5 * MIB)
        elif inside and head == "Rss:":
            total += int(line.split()[1]) << 10
    return total


@both
def test_without_a_gpu_nothing_is_locked(kind: type[Store]):
    """Where this process does not use a GPU, buffers are not locked and there is nothing to note."""
    store = kind(lambda: None)

    assert not store.allocate(3 * MIB).locked
    assert store.notes() == ()
    store.close()


def test_a_gpu_is_not_used_for_this_alone(monkeypatch: pytest.MonkeyPatch):
    """CUDA's runtime is asked only where torch has begun to use it: a forked child, or an actor on the CPU, has not."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: "runtime")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert locking.cuda_runtime() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert locking.cuda_runtime() == "runtime"


@both
def test_page_locks_go_with_the_store(kind: type[Store]):
    """A store that is dropped without close leaves no registration behind, before its memory is unmapped."""
    runtime = FakeCudaRuntime()
    store = kind(lambda: runtime)
    buffer = store.allocate(10_000)
    address = tensor_over(buffer).data_ptr()
    assert address in runtime.registered

    del store

    assert runtime.registered == {}
    assert buffer.memory[:3] == bytes(3)


@both
def test_a_refusal_falls_back_and_is_noted(kind: type[Store], monkeypatch: pytest.MonkeyPatch):
    """When CUDA will not lock pages the buffer works unlocked; the reason and the way out are noted, once."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    monkeypatch.setattr(pages, "require", lambda *_: None)  # it asks for a limit too
    runtime = FakeCudaRuntime(code=2)
    store = kind(lambda: runtime)
    buffers = [store.allocate(10_000), store.allocate(20_000)]

    assert [buffer.locked for buffer in buffers] == [False, False]
    tensor_over(buffers[1]).fill_(7)
    assert buffers[1].memory[19_999] == 7
    (note,) = store.notes()
    assert "CUDA error 2" in note
    assert "65536 bytes" in note
    assert "ulimit -l" in note
    store.close()
    assert runtime.asked == 2


def test_a_later_registration_may_succeed():
    """A refusal is not for ever: the next buffer is tried again, and only that one is unregistered."""
    runtime = FakeCudaRuntime(code=2)
    store = PinnedStore(lambda: runtime)
    first = store.allocate(100)
    runtime.code = 0
    second = store.allocate(100)

    assert (first.locked, second.locked) == (False, True)
    store.close()
    assert runtime.registered == {}


@pytest.mark.parametrize(("kind", "setting"), [(PinnedStore, "enabled"), (SharedStore, "shmem_enabled")])
@pytest.mark.parametrize(("word", "noted"), [("never", 1), ("deny", 1), ("advise", 0), ("always", 0)])
def test_small_pages_are_noted(kind: type[Store], setting: str, word: str, noted: int, monkeypatch: pytest.MonkeyPatch):
    """Where the system has no huge pages for a store's memory, a large buffer notes it, with the setting to change."""
    monkeypatch.setattr(pages, "huge_pages", lambda which: word if which == setting else "another")
    runtime = FakeCudaRuntime()
    store = kind(lambda: runtime)
    store.allocate(4096)
    assert store.notes() == ()
    store.allocate(3 * MIB)
    store.allocate(3 * MIB)

    assert len(store.notes()) == noted
    assert all(f"transparent_hugepage/{setting} " in note for note in store.notes())
    store.close()


@both
def test_sealed_buffers_are_unlocked_while_writable(kind: type[Store]):
    """Giving back a read-only buffer makes it writable, then unregisters it, then drops its pages."""
    runtime = FakeCudaRuntime()
    pool = BufferPool(kind(lambda: runtime), protect=True)
    buffer = pool.acquire(5000)
    pool.seal(buffer)
    assert permissions(tensor_over(buffer).data_ptr()).startswith("r-")

    pool.close()

    assert runtime.registered == {}
    assert runtime.asked == 1


@both
def test_a_failure_to_populate_keeps_nothing(kind: type[Store], monkeypatch: pytest.MonkeyPatch):
    """When one slice can not be populated, the error is raised, and even while it is handled no memory is left."""
    populate = pages._populate_range
    fails = iter([None, None, OSError(errno.ENOMEM, "no memory, as asked")])

    def sabotaged(start: int, nbytes: int) -> None:
        error = next(fails, None)
        if error is not None:
            raise error
        populate(start, nbytes)

    monkeypatch.setattr(pages, "_populate_range", sabotaged)
    monkeypatch.setattr(pages, "populate_threads", lambda: 2)
    runtime = FakeCudaRuntime()
    store = kind(lambda: runtime)
    gc.collect()  # of other tests
    before, files = pages.resident_anonymous(), shared_blocks()

    with pytest.raises(OSError, match="as asked") as caught:
        store.allocate(96 * MIB)

    assert caught.tb is not None  # and with it every frame that the mapping was in
    assert pages.resident_anonymous() < before + 4 * MIB
    assert sum(shared_blocks()) == sum(files)
    assert runtime.asked == 0
    del caught
    gc.collect()
    assert shared_blocks() == files
    assert store.allocate(10).nbytes == 10
    store.close()


def shared_blocks() -> list[int]:
    """Bytes allocated behind each descriptor of a shared buffer that this process has."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that this listing uses
            if os.readlink(descriptor).startswith("/memfd:actor-lifecycle"):
                found.append(descriptor.stat().st_blocks * 512)
    return sorted(found)


@pytest.mark.parametrize("kind", [PinnedStore, SharedStore])
def test_a_failure_after_locking_unlocks(kind: type[Store], monkeypatch: pytest.MonkeyPatch):
    """When something is raised out of the registration, what it may have registered is undone."""

    class Interrupted(FakeCudaRuntime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            super().cudaHostRegister(address, nbytes, flags)
            raise KeyboardInterrupt

    runtime = Interrupted()
    store = kind(lambda: runtime)

    with pytest.raises(KeyboardInterrupt):
        store.allocate(10_000)
    assert runtime.registered == {}


def test_files_are_not_locked(tmp_path: Path):
    """Copies on disk are never page-locked, and nothing is noted about it."""
    store = DiskStore(tmp_path)

    assert not store.allocate(100).locked
    assert store.notes() == ()
    store.close()


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Path:
    """Two nodes of cores and one of memory alone; a GPU on node 1 and one that does not tell."""
    for node, cores in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "\n")):
        (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{node}" / "cpulist").write_text(cores)
    for gpu, node in (("0000:3b:00.0", "1"), ("0000:5e:00.0", "-1"), ("0000:60:00.0", "2")):
        (tmp_path / "pci" / gpu).mkdir(parents=True)
        (tmp_path / "pci" / gpu / "numa_node").write_text(node + "\n")
    return tmp_path


def test_nodes_with_cores(machine: Path):
    """Nodes are those with cores, each with all of them."""
    assert numa.cpu_nodes(machine / "nodes") == {
        0: {0, 1, 2, 3, 8, 9, 10, 11},
        1: {4, 5, 6, 7, 12, 13, 14, 15},
    }
    assert numa.cpu_nodes(machine / "missing") == {}


@pytest.mark.parametrize(
    ("gpu", "core", "node"),
    [
        ("0000:3b:00.0", 0, 1),
        ("0000:5e:00.0", 0, 0),
        ("0000:5e:00.0", 12, 1),
        ("0000:60:00.0", 9, 0),
        ("0000:99:00.0", 5, 1),
        (None, 5, 1),
        (None, 99, None),
    ],
)
def test_the_nearest_node(machine: Path, gpu: str | None, core: int, node: int | None):
    """The GPU's node counts; where it is not told, or has no cores, the one of the core in use."""
    assert numa.nearest_node(gpu, core, machine / "nodes", machine / "pci") == node


def test_memory_goes_to_the_gpus_node(machine: Path, monkeypatch: pytest.MonkeyPatch):
    """On a machine with several nodes a buffer is bound to the GPU's, before its pages are there."""
    bound = []
    monkeypatch.setattr(pages, "prefer_node", lambda memory, node: bound.append((memory, node)))
    monkeypatch.setattr(numa, "gpu_address", lambda: "0000:3b:00.0")
    memory = pages.anonymous(100)

    assert numa.move_near(memory, machine / "nodes", machine / "pci") is None
    assert bound == [(memory, 1)]


def test_one_node_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a machine with one node nothing is bound, and torch is not asked for its GPU."""
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-7\n")
    asked = []
    monkeypatch.setattr(numa, "gpu_address", lambda: asked.append("gpu"))

    assert numa.move_near(pages.anonymous(100), tmp_path, tmp_path) is None
    assert asked == []


@pytest.mark.parametrize(("kind", "module"), [(PinnedStore, pinned), (SharedStore, shared)])
def test_a_refused_node_is_noted(kind: type[Store], module: object, machine: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the kernel will not bind memory, as in most containers, the buffer works and a note names the way out."""

    def refuse(memory: object, node: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    near: Callable[..., str | None] = numa.move_near
    monkeypatch.setattr(pages, "prefer_node", refuse)
    monkeypatch.setattr(numa, "gpu_address", lambda: "0000:3b:00.0")
    monkeypatch.setattr(module, "move_near", lambda memory: near(memory, machine / "nodes", machine / "pci"))
    store = kind(lambda: None)
    buffers = [store.allocate(100), store.allocate(100)]

    assert [buffer.nbytes for buffer in buffers] == [100, 100]
    (note,) = store.notes()
    assert "NUMA node 1: Operation not permitted" in note
    assert "SYS_NICE" in note
    store.close()


class Gpu:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 59, 10


def test_pci_addresses():
    """A GPU's numbers are written as the kernel names its directory; older versions of torch do not tell them."""
    assert numa.pci_address(Gpu()) == "0000:3b:0a.0"
    assert numa.pci_address(object()) is None


def test_the_core_in_use():
    """It is one of those this process may use."""
    assert numa.current_cpu() in os.sched_getaffinity(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinning_is_measured_with_cuda_alone():
    """Without a CUDA device the measurement refuses, with what it needs."""
    with pytest.raises(LifecycleError, match="needs a CUDA device"):
        pinning.measure(nbytes=MIB, rounds=1)
