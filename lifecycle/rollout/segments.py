"""The engine's read-only mappings of the sender's memory, kept from one update to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from mmap import MAP_SHARED, PROT_READ, mmap
from typing import Any

from attrs import frozen


@frozen(eq=False)
class _Mapped:
    device: int
    inode: int
    memory: mmap

    def same(self, status: os.stat_result, nbytes: int) -> bool:
        return (self.device, self.inode, len(self.memory)) == (status.st_dev, status.st_ino, nbytes)


class SegmentCache:
    """Mappings by segment id. Only the segments of the newest update stay mapped.

    A mapping keeps the memory behind it alive, also after the sender freed it: what the newest update does not name is
    dropped. While it is mapped its inode can not be given to other memory, so equal inode means the same memory.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Mapped] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._held)

    def open(self, segments: Sequence[Mapping[str, Any]], fds: Sequence[int]) -> dict[int, mmap]:
        """Map each of ``segments`` (plain ``id`` and ``nbytes``, in the order of ``fds``), or take the mapping held.

        Raises ValueError when a descriptor is missing, is no file, or is shorter than its segment says (reading beyond
        the end would kill the process); the mappings held before stay then. The descriptors stay the caller's.
        """
        if len(segments) != len(fds):
            raise ValueError(f"{len(segments)} segments came with {len(fds)} file descriptors")
        opened = {
            int(segment["id"]): self._map(int(segment["id"]), int(segment["nbytes"]), fd)
            for segment, fd in zip(segments, fds, strict=True)
        }
        self._held = opened
        return {number: mapped.memory for number, mapped in opened.items()}

    def _map(self, number: int, nbytes: int, fd: int) -> _Mapped:
        status = os.fstat(fd)
        if not 0 < nbytes <= status.st_size:
            raise ValueError(f"segment {number} is to have {nbytes} bytes, but its file has {status.st_size}")
        held = self._held.get(number)
        if held is not None and held.same(status, nbytes):
            return held
        try:
            memory = mmap(fd, nbytes, MAP_SHARED, PROT_READ)
        except OSError as error:
            raise ValueError(f"segment {number} can not be mapped: {error}") from error
        return _Mapped(status.st_dev, status.st_ino, memory)
