"""Host memory of this process alone; page-locked where there is a GPU, so that copies run at the link's speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    def allocate(self, nbytes: int) -> HostBuffer:
        pages.require(nbytes, "a host buffer")
        memory = pages.anonymous(nbytes)
        pages.populate(memory)
        runtime = self._runtime()
        if runtime is not None:
            code = int(runtime.cudaHostRegister(pages.address(memory), len(memory), 0))
            if code != 0:
                raise OSError(f"cudaHostRegister of {len(memory)} bytes failed with CUDA error {code}")
        return self._live.add(nbytes, memory)

    def free(self, buffer: HostBuffer) -> None:
        self._live.remove(buffer)
        runtime = self._runtime()
        if runtime is not None:
            runtime.cudaHostUnregister(pages.address(buffer.memory))
        pages.drop(buffer.memory)

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)
