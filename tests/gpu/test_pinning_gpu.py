"""Host buffers that are really registered with CUDA: copies both ways, registrations that come and go."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lifecycle.bench import pinning
from lifecycle.hoststore import locking, numa
from lifecycle.hoststore.base import tensor_over
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.hoststore.shared import SharedStore
from lifecycle.memory import pages

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
Store = PinnedStore | SharedStore
both = pytest.mark.parametrize("kind", [PinnedStore, SharedStore])


@pytest.fixture(autouse=True)
def _used_gpu() -> None:
    """Buffers are locked only in a process that uses a GPU."""
    torch.zeros(1, device="cuda")


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


@both
@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 3])
def test_buffers_are_pinned(kind: type[Store], nbytes: int):
    """torch sees a buffer as pinned, wherever it starts, until it is freed."""
    store = kind()
    buffer = store.allocate(nbytes)
    view = tensor_over(buffer)

    assert buffer.locked
    assert view.is_pinned()
    assert view[nbytes - 1 :].is_pinned()
    assert not [note for note in store.notes() if "not page-locked" in note]
    store.free(buffer)
    assert not view.is_pinned()


@both
@pytest.mark.parametrize("nbytes", [1, 4097, 3 * MIB + 17, 33 * MIB + 5])
def test_bytes_come_and_go(kind: type[Store], nbytes: int):
    """Bytes copied out to a buffer and back in, without waiting in between, are the same to the last one."""
    store = kind()
    buffer = store.allocate(nbytes)
    view, sent = tensor_over(buffer), random_bytes(nbytes)
    back = torch.zeros_like(sent)

    view.copy_(sent, non_blocking=True)
    back.copy_(view, non_blocking=True)
    torch.cuda.synchronize()

    assert torch.equal(view, sent.cpu())
    assert torch.equal(back, sent)
    assert buffer.memory[nbytes - 1] == int(sent[-1])
    store.close()


@both
def test_an_address_is_registered_again(kind: type[Store]):
    """Buffers that are mapped where freed ones were are registered like the first, and work."""
    store, addresses = kind(), []
    for _ in range(10):
        buffer, sent = store.allocate(8 * MIB), random_bytes(8 * MIB)
        addresses.append(tensor_over(buffer).data_ptr())
        assert buffer.locked
        assert tensor_over(buffer).copy_(sent).equal(sent.cpu())
        store.free(buffer)
        del buffer
        gc.collect()

    assert len(set(addresses)) < len(addresses)


@both
def test_memory_stays_flat(kind: type[Store]):
    """50 buffers taken and given back leave the process as large as it was, and nothing registered."""
    store = kind()

    def cycle() -> None:
        buffer = store.allocate(16 * MIB)
        tensor_over(buffer).copy_(torch.full((16 * MIB,), 3, dtype=torch.uint8, device="cuda"))
        store.free(buffer)

    for _ in range(5):
        cycle()
    before = psutil.Process().memory_info().rss
    for _ in range(50):
        cycle()

    assert psutil.Process().memory_info().rss < before + 16 * MIB
    assert store._locks._locked == {}


@both
def test_registrations_go_with_the_store(kind: type[Store]):
    """A store that is dropped without close leaves its buffers' memory readable and no longer registered."""
    store = kind()
    buffer = store.allocate(3 * MIB)
    view = tensor_over(buffer)
    view.fill_(9)
    assert view.is_pinned()

    del store
    gc.collect()

    assert not view.is_pinned()
    assert bool((view == 9).all())


@both
def test_the_device_reads_a_sealed_buffer(kind: type[Store]):
    """A read-only buffer can be copied in; taken again it is writable, and can be copied out to; then it is freed."""
    pool = BufferPool(kind(), protect=True)
    buffer, first, second = pool.acquire(2 * MIB + 1), random_bytes(2 * MIB + 1), random_bytes(2 * MIB + 1)
    view = tensor_over(buffer)
    view.copy_(first)
    pool.seal(buffer)
    back = torch.zeros_like(first)
    back.copy_(view, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, first)

    pool.release(buffer)
    assert pool.acquire(2 * MIB + 1) is buffer
    view.copy_(second)
    pool.seal(buffer)

    assert torch.equal(view, second.cpu())
    pool.close()
    assert not view.is_pinned()


class Refusing:
    """CUDA's runtime asked for the same memory twice: the second time it really refuses."""

    def __init__(self) -> None:
        self.real: Any = locking.cuda_runtime()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert int(self.real.cudaHostRegister(address, nbytes, flags)) == 0
        return int(self.real.cudaHostRegister(address, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        raise AssertionError("what was refused was unregistered")


@both
def test_a_refusal_leaves_no_error_behind(kind: type[Store]):
    """After CUDA refused to lock, the next kernel is not blamed for it; the buffer works; the note has CUDA's words."""
    runtime = Refusing()
    store = kind(lambda: runtime)
    buffer = store.allocate(4096)
    assert int(runtime.real.cudaHostUnregister(tensor_over(buffer).data_ptr())) == 0

    assert torch.ones(3, device="cuda").sum().item() == 3
    assert not buffer.locked
    assert not tensor_over(buffer).is_pinned()
    sent = random_bytes(4096)
    assert tensor_over(buffer).copy_(sent).equal(sent.cpu())
    (note,) = (note for note in store.notes() if "cudaHostRegister" in note)
    assert re.search(r"CUDA error 712 \(\w+", note)
    store.close()


UNUSED = """
import torch
from lifecycle.hoststore.pinned import PinnedStore
store = PinnedStore()
print(store.allocate(100).locked, torch.cuda.is_initialized())
torch.zeros(1, device="cuda")
print(store.allocate(100).locked)
"""


def test_a_process_that_uses_no_gpu_gets_no_context():
    """Allocating alone starts no CUDA context, which takes device memory; once there is one, buffers are locked."""
    done = subprocess.run([sys.executable, "-c", UNUSED], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "False False\nTrue\n"


def test_the_gpus_address_is_an_nvidia_device():
    """The PCI address made from torch's numbers is that of a device of NVIDIA's, as the kernel lists it."""
    address = numa.gpu_address()
    vendor = numa.PCI / (address or "none") / "vendor"
    if not vendor.exists():
        pytest.skip(f"no {vendor} here")

    assert vendor.read_text().strip() == "0x10de"


def test_pinning_is_measured():
    """Every round has its times, rates follow from their medians, and everything that was taken is given back."""
    pinning.measure(nbytes=8 * MIB, rounds=1)  # what CUDA keeps for itself the first time
    before = pages.resident_anonymous()
    found = pinning.measure(nbytes=64 * MIB, rounds=3)

    assert len(found.rounds) == 3
    assert all(min(one.private.register, one.shared.register, one.cuda_malloc_host) > 0 for one in found.rounds)
    assert all(min(one.private.map_and_populate, one.shared.map_and_populate) > 0 for one in found.rounds)
    middle = sorted(one.private.total for one in found.rounds)[1]
    assert found.private_gib_s == pytest.approx(64 / 1024 / middle)
    assert found.ratio == pytest.approx(found.private_gib_s / found.cuda_malloc_host_gib_s)
    assert json.loads(json.dumps(found.to_plain()))["nbytes"] == 64 * MIB
    assert pages.resident_anonymous() < before + 32 * MIB
