"""The buffers a store has given out and not yet got back."""

from __future__ import annotations

from itertools import count
from mmap import mmap

from lifecycle.hoststore.base import HostBuffer

_ids = count(1)  # one sequence for the process: buffers of different stores must not be taken for each other


class LiveBuffers:
    """Numbers buffers as they are made and knows which are out."""

    def __init__(self) -> None:
        self._buffers: dict[int, HostBuffer] = {}

    def add(self, nbytes: int, memory: mmap, fd: int | None = None, locked: bool = False) -> HostBuffer:
        buffer = HostBuffer(next(_ids), nbytes, memory, fd, locked)
        self._buffers[buffer.id] = buffer
        return buffer

    def remove(self, buffer: HostBuffer) -> None:
        known = self._buffers.pop(buffer.id, None)
        assert known is buffer, f"buffer {buffer.id} is not one of this store, or was freed"

    def all(self) -> tuple[HostBuffer, ...]:
        return tuple(self._buffers.values())
