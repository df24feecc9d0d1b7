"""Buffers laid out once and re-used for ever: what a part leaves, the next part of that size takes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lifecycle.hoststore.base import HostBuffer, HostStore
from lifecycle.memory import pages


class BufferPool:
    """Re-uses a store's buffers by exact size. Called under the controller's lock; not thread-safe by itself.

    ``on_allocate`` is called with each buffer that is really new; when it raises, the buffer goes back to the store.
    With ``protect`` sealed buffers are read-only for this process: a stray write ends it with SIGSEGV.
    """

    def __init__(
        self, store: HostStore, on_allocate: Callable[[HostBuffer], None] = lambda _: None, protect: bool = False
    ) -> None:
        self.store = store
        self.allocations = 0  # ever made, the measure of re-use
        self._on_allocate = on_allocate
        self._protect = protect
        self._used: dict[int, HostBuffer] = {}
        self._free: dict[int, list[HostBuffer]] = {}  # by nbytes

    @property
    def in_use(self) -> int:
        """Number of buffers acquired and not released."""
        return len(self._used)

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the store now, in use or free."""
        return sum(buffer.nbytes for buffer in (*self._used.values(), *self._all_free()))

    def owns(self, buffer: HostBuffer) -> bool:
        """Whether the buffer was acquired here and not released."""
        return buffer.id in self._used

    def acquire(self, nbytes: int) -> HostBuffer:
        """A writable buffer of exactly this size; its contents are undefined.

        When the store has no room, free buffers of other sizes are given up and it is asked once more. Raises OSError
        or MemoryError when there is none even then.
        """
        buffer = self._reuse(nbytes) or self._allocate(nbytes)
        self._used[buffer.id] = buffer
        return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Make the buffer available to later ``acquire``s."""
        known = self._used.pop(buffer.id, None)
        assert known is buffer, f"buffer {buffer.id} is not in use"
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    def seal(self, buffer: HostBuffer) -> None:
        """The copy in it is complete: read-only from here on, where the pool protects."""
        if self._protect:
            pages.protect(buffer.memory, writable=False)

    def unseal(self, buffer: HostBuffer) -> None:
        if self._protect:
            pages.protect(buffer.memory, writable=True)

    def shrink(self, keep: Collection[int] = ()) -> None:
        """Give free buffers back to the store, except those of the sizes in ``keep``."""
        for nbytes in self._free.keys() - set(keep):
            for buffer in self._free.pop(nbytes):
                self._give_back(buffer)

    def close(self) -> None:
        """Give everything back, buffers in use too, and close the store."""
        for buffer in (*self._used.values(), *self._all_free()):
            self._give_back(buffer)
        self._used.clear()
        self._free.clear()
        self.store.close()

    def _reuse(self, nbytes: int) -> HostBuffer | None:
        free = self._free.get(nbytes)
        if not free:
            return None
        buffer = free.pop()
        self.unseal(buffer)
        return buffer

    def _allocate(self, nbytes: int) -> HostBuffer:
        try:
            buffer = self.store.allocate(nbytes)
        except (OSError, MemoryError):
            self.shrink()
            buffer = self.store.allocate(nbytes)
        try:
            self._on_allocate(buffer)
        except BaseException:
            self.store.free(buffer)
            raise
        self.allocations += 1
        return buffer

    def _give_back(self, buffer: HostBuffer) -> None:
        self.unseal(buffer)  # read-only pages can not be given back
        self.store.free(buffer)

    def _all_free(self) -> list[HostBuffer]:
        return [buffer for buffers in self._free.values() for buffer in buffers]
