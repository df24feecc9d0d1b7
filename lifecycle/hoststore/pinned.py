"""Host memory of this process alone; page-locked where there is a GPU, so that copies run at the link's speed."""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from typing import Any
from weakref import finalize

from lifecycle.hoststore.base import HostBuffer
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.memory import pages
from states.resources import Copy


def cuda_runtime() -> Any:
    """torch's binding of the CUDA runtime, or None on a machine without a GPU."""
    import torch

    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


class PinnedStore:
    """Buffers in private anonymous memory, populated at once. Implements ``HostStore``.

    The pages are mapped first and registered with CUDA afterwards: with huge pages that is several times faster than
    ``cudaMallocHost``, and exactly as many bytes as asked for, where torch's own pinned cache rounds up.
    """

    name = "pinned"
    copy = Copy.HOST
    shared = False

    def __init__(self, runtime: Callable[[], Any] = cuda_runtime) -> None:
        self._runtime = runtime
        self._live = LiveBuffers()
        self._locked: dict[int, tuple[Any, mmap]] = {}  # address -> runtime and the memory registered with it
        # A mapping that goes while it is registered blocks its address for every later registration.
        finalize(self, _unlock_all, self._locked).atexit = False

    def allocate(self, nbytes: int) -> HostBuffer:
        pages.require(nbytes, "a host buffer")
        memory = pages.anonymous(nbytes)
        pages.populate(memory)
        self._lock(memory)
        return self._live.add(nbytes, memory)

    def free(self, buffer: HostBuffer) -> None:
        self._live.remove(buffer)
        address = pages.address(buffer.memory)
        if address in self._locked:
            runtime, _ = self._locked.pop(address)
            runtime.cudaHostUnregister(address)
        pages.drop(buffer.memory)

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)

    def _lock(self, memory: mmap) -> None:
        runtime = self._runtime()
        if runtime is None:
            return
        code = int(runtime.cudaHostRegister(pages.address(memory), len(memory), 0))
        if code != 0:
            raise OSError(f"cudaHostRegister of {len(memory)} bytes failed with CUDA error {code}")
        self._locked[pages.address(memory)] = runtime, memory


def _unlock_all(locked: dict[int, tuple[Any, mmap]]) -> None:
    for address, (runtime, _) in locked.items():
        runtime.cudaHostUnregister(address)
