"""Host stores and the pool: bytes are really reserved, shared, freed, protected."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lifecycle.hoststore.base import tensor_over
from lifecycle.hoststore.disk import DiskStore
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.hoststore.shared import SharedStore
from lifecycle.memory import pages
from lifecycle.testing.contracts import HostStoreContract
from lifecycle.testing.fakes import FakeStore
from states.resources import Copy

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


class TestPinned(HostStoreContract):
    def make(self) -> PinnedStore:
        return PinnedStore()


class TestShared(HostStoreContract):
    def make(self) -> SharedStore:
        return SharedStore()


class TestDisk(HostStoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path):
        self.path = tmp_path

    def make(self) -> DiskStore:
        return DiskStore(self.path)


class TestFake(HostStoreContract):
    def make(self) -> FakeStore:
        return FakeStore()


def blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_pinned_memory_is_there_at_once_and_gone_at_once():
    """Allocating takes resident memory before anything is written; freeing gives it back while tensors still exist."""
    store = PinnedStore()
    before = pages.resident_anonymous()
    buffer = store.allocate(64 * MIB)
    view = tensor_over(buffer)

    assert pages.resident_anonymous() > before + 60 * MIB
    store.free(buffer)
    assert pages.resident_anonymous() < before + 4 * MIB
    assert not view[:4096].any()


def test_shared_memory_counts_and_is_freed_while_others_map_it():
    """A shared buffer's blocks exist from the start, and are gone after free although another mapping remains."""
    store = SharedStore()
    buffer = store.allocate(8 * MIB)
    other = os.dup(buffer.fd)
    assert blocks(other) == 8 * MIB
    tensor_over(buffer).fill_(1)

    store.free(buffer)

    assert blocks(other) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)
    os.close(other)


def test_shared_memory_can_not_be_resized():
    """Nobody who has the descriptor can shorten or lengthen the buffer, or change that; a new program gets no copy."""
    store = SharedStore()
    buffer = store.allocate(8192)

    for size in (0, 4096, 100_000):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(buffer.fd)
    store.close()


READER = """
import mmap, os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(channel, 1, 1)
memory = mmap.mmap(fds[0], os.fstat(fds[0]).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
print(memory[:] == bytes(range(256)) * 39, flush=True)
channel.recv(1)
print(memory[5], flush=True)
"""


def test_another_process_reads_the_same_bytes():
    """A second process maps the descriptor it was sent and sees the bytes, later writes too, without a copy."""
    store = SharedStore()
    buffer = store.allocate(256 * 39)
    buffer.memory[:] = bytes(range(256)) * 39
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-c", READER, str(there.fileno())]
        with subprocess.Popen(command, pass_fds=[there.fileno()], stdout=subprocess.PIPE, text=True) as reader:
            socket.send_fds(here, [b"!"], [buffer.fd])
            assert reader.stdout.readline() == "True\n"
            buffer.memory[5] = 77
            here.send(b"!")
            assert reader.stdout.readline() == "77\n"
    assert reader.returncode == 0
    store.close()


def test_disk_files_have_no_name_and_are_private(tmp_path: Path):
    """A disk buffer is a file of this user alone that no name leads to, with its blocks reserved and given back."""
    store = DiskStore(tmp_path)
    buffer = store.allocate(MIB)
    status = os.fstat(buffer.fd)

    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, MIB)
    assert blocks(buffer.fd) >= MIB
    assert not os.get_inheritable(buffer.fd)
    assert list(tmp_path.iterdir()) == []
    assert store.copy is Copy.DISK
    other = os.dup(buffer.fd)
    store.close()
    assert blocks(other) == 0
    os.close(other)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_disk_store_needs_a_directory(name: str, tmp_path: Path):
    """A path where no files can be made is refused at once, with the path and the reason."""
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="can not make files there") as caught:
        DiskStore(tmp_path / name)

    assert caught.value.filename == str(tmp_path / name)
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)


def test_freeing_where_files_can_not_have_holes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """On a file system without holes free still works; the blocks go with the last mapping."""

    def refuse(memory: object, advice: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes")

    store = DiskStore(tmp_path)
    buffer = store.allocate(100)
    monkeypatch.setattr(pages, "advise", refuse)

    store.free(buffer)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)


@pytest.fixture(name="file_limit")
def _file_limit():
    """No file of this process grows beyond 1 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    yield MIB
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("make", [lambda _: SharedStore(), DiskStore])
def test_a_refusal_of_the_kernel_keeps_nothing(make, file_limit: int, tmp_path: Path):
    """When the kernel will not reserve the blocks, its error is raised and no descriptor is left."""
    store = make(tmp_path)
    before = sorted(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="File too large"):
        store.allocate(file_limit + 1)

    assert sorted(os.listdir("/proc/self/fd")) == before
    assert store.allocate(file_limit).nbytes == file_limit
    store.close()


PREAMBLE = """
import os, resource, sys
from lifecycle.hoststore.disk import DiskStore
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.hoststore.shared import SharedStore
MIB = 1 << 20
def descriptors(): return len(os.listdir("/proc/self/fd"))
def attempt(store, nbytes):
    before = descriptors()
    try:
        store.allocate(nbytes)
    except (OSError, MemoryError) as error:
        print(type(error).__name__, str(error)[:60])
    assert descriptors() == before
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_full_address_space_is_an_error():
    """Beyond RLIMIT_AS private and shared buffers are refused with the sizes; smaller ones are still given."""
    done = python("""
resource.setrlimit(resource.RLIMIT_AS, (600 * MIB, -1))
none = lambda: None
attempt(PinnedStore(none), 700 * MIB)
attempt(SharedStore(), 700 * MIB)
print(PinnedStore(none).allocate(MIB).nbytes, SharedStore().allocate(MIB).nbytes)
""")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("MemoryError no room for a host buffer: 734003200 bytes needed")
    assert lines[1].startswith("MemoryError no room for a shared host buffer: 734003200 bytes")
    assert lines[2] == "1048576 1048576"


def test_a_file_that_can_not_grow_is_an_error(tmp_path: Path):
    """Beyond RLIMIT_FSIZE allocation fails with OSError, no descriptor is left, and nothing is written later."""
    done = python(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
for store in (SharedStore(), DiskStore(sys.argv[1])):
    attempt(store, 2 * MIB)
    buffer = store.allocate(MIB)
    buffer.memory[:] = bytes(MIB)
    store.close()
""",
        str(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "OSError [Errno 27] File too large\n" * 2
    assert list(tmp_path.iterdir()) == []


def test_the_pool_reuses_by_exact_size():
    """A released buffer serves the next request of its size and no other; only new ones are counted and announced."""
    announced = []
    pool = BufferPool(FakeStore(), announced.append)
    first = pool.acquire(100)
    second = pool.acquire(100)
    pool.release(first)

    assert pool.acquire(100) is first
    assert pool.acquire(200).nbytes == 200
    assert announced[:2] == [first, second]
    assert (pool.allocations, pool.allocated_bytes, pool.in_use) == (3, 400, 3)


def test_the_pool_refuses_what_is_not_in_use():
    """Releasing a buffer twice, or one of another pool, is an AssertionError."""
    pool, other = BufferPool(FakeStore()), BufferPool(FakeStore())
    buffer = pool.acquire(10)
    with pytest.raises(AssertionError, match="not in use"):
        other.release(buffer)
    pool.release(buffer)
    with pytest.raises(AssertionError, match="not in use"):
        pool.release(buffer)


def test_shrinking_frees_what_no_part_needs():
    """Free buffers of other sizes than those to keep go back to the store; buffers in use stay."""
    store = FakeStore()
    pool = BufferPool(store)
    used, *free = [pool.acquire(nbytes) for nbytes in (1, 1, 2, 3, 3)]
    for buffer in free:
        pool.release(buffer)

    pool.shrink(keep=[2])

    assert sorted(nbytes for call, nbytes in store.calls if call == "free") == [1, 3, 3]
    assert (pool.allocated_bytes, pool.in_use) == (3, 1)
    pool.release(used)
    pool.close()
    assert pool.allocated_bytes == 0
    assert sum(1 for call, _ in store.calls if call == "free") == 5


def test_a_failed_allocation_first_gives_up_free_buffers():
    """When the store has no room, unused buffers of other sizes are freed and it is asked once more."""
    store = FakeStore(fail_at=2)
    pool = BufferPool(store)
    pool.release(pool.acquire(50))

    assert pool.acquire(60).nbytes == 60
    assert store.calls == [("allocate", 50), ("allocate", 60), ("free", 50), ("allocate", 60)]
    assert pool.allocated_bytes == 60


def test_no_room_even_then():
    """When there is no room after that either, the store's error is raised and the pool is as before."""
    pool = BufferPool(PinnedStore())
    with pytest.raises(MemoryError, match="no room for a host buffer"):
        pool.acquire(1 << 60)

    assert (pool.allocations, pool.allocated_bytes, pool.in_use) == (0, 0, 0)


def test_a_raising_listener_leaks_nothing():
    """When on_allocate raises, the new buffer goes back to the store and the error to the caller."""

    def refuse(_: object) -> None:
        raise ValueError("not now")

    store = FakeStore()
    pool = BufferPool(store, refuse)
    with pytest.raises(ValueError, match="not now"):
        pool.acquire(10)

    assert store.calls[-1] == ("free", 10)
    assert pool.allocated_bytes == 0


WRITE_TO_SEALED = """
store = {"pinned": lambda: PinnedStore(lambda: None), "shared": SharedStore, "disk": lambda: DiskStore(sys.argv[2])}
pool = BufferPool(store[sys.argv[1]](), protect=True)
buffer = pool.acquire(5000)
buffer.memory[:3] = b"abc"
pool.seal(buffer)
print(buffer.memory[:3], flush=True)
buffer.memory[0] = 0
print("written")
"""


@pytest.mark.parametrize("store", ["pinned", "shared", "disk"])
def test_sealed_buffers_can_not_be_written(store: str, tmp_path: Path):
    """With protect on, a sealed buffer can be read, and a write to it ends the process with SIGSEGV."""
    done = python(WRITE_TO_SEALED, store, str(tmp_path))

    assert done.stdout == "b'abc'\n"
    assert done.returncode == -signal.SIGSEGV


def test_without_protection_sealing_does_nothing():
    """With protect off a sealed buffer can be written."""
    pool = BufferPool(FakeStore())
    buffer = pool.acquire(10)
    pool.seal(buffer)

    buffer.memory[0] = 1

    assert buffer.memory[0] == 1


@pytest.mark.parametrize("make", [PinnedStore, SharedStore])
def test_sealed_buffers_come_back_writable(make: Callable[[], PinnedStore | SharedStore]):
    """Acquiring a sealed buffer again, unsealing it, and freeing it while sealed all work."""
    pool = BufferPool(make(), protect=True)
    buffer = pool.acquire(5000)
    pool.seal(buffer)
    pool.release(buffer)
    assert pool.acquire(5000) is buffer
    buffer.memory[0] = 1
    pool.seal(buffer)
    pool.unseal(buffer)
    buffer.memory[0] = 2
    pool.seal(buffer)

    pool.close()

    assert pool.allocated_bytes == 0
    assert buffer.memory[0] == 0
