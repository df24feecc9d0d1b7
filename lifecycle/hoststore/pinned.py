"""Host memory of this process alone; page-locked where there is a GPU, so that copies run at the link's speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lifecycle.hoststore.base import HostBuffer
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.hoststore.locking import PageLocks, cuda_runtime
from lifecycle.hoststore.numa import move_near
from lifecycle.memory import pages
from states.resources import Copy


class PinnedStore:
    """Buffers in private anonymous memory, populated at once. Implements ``HostStore``.

    The pages are mapped first, in huge pages and on all cores, and registered with CUDA afterwards in one piece (a copy
    may not cross from one registration into the next): several times faster than ``cudaMallocHost``, and exactly as
    many bytes as asked for, where torch's own pinned cache rounds up.
    """

    name = "pinned"
    copy = Copy.HOST
    shared = False

    def __init__(self, runtime: Callable[[], Any] = cuda_runtime) -> None:
        self._locks = PageLocks("enabled", runtime)
        self._live = LiveBuffers()

    def allocate(self, nbytes: int) -> HostBuffer:
        pages.require(nbytes, "a host buffer")
        memory = pages.anonymous(nbytes)
        try:
            self._locks.note(move_near(memory))
            pages.populate(memory)
            locked = self._locks.lock(memory)
        except BaseException:
            self._locks.unlock(memory)
            pages.drop(memory)  # the exception may keep the mapping for a while
            raise
        return self._live.add(nbytes, memory, locked=locked)

    def free(self, buffer: HostBuffer) -> None:
        self._live.remove(buffer)
        self._locks.unlock(buffer.memory)
        pages.drop(buffer.memory)

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)

    def notes(self) -> tuple[str, ...]:
        """What was fallen back to so far, why, and what to do about it."""
        return self._locks.notes()
