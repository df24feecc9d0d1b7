"""Host memory that other processes of this host can map: a rollout engine copies straight from the actor's copy."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from mmap import MADV_REMOVE, mmap
from typing import Any

from lifecycle.hoststore.base import HostBuffer
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.hoststore.locking import PageLocks, cuda_runtime
from lifecycle.hoststore.numa import move_near
from lifecycle.memory import pages
from states.resources import Copy

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SharedStore:
    """One ``memfd`` per buffer, exactly ``nbytes`` long. Implements ``HostStore``.

    ``HostBuffer.fd`` is closed on exec and lives until ``free``; pass it on with ``socket.send_fds``. Its size is
    sealed: nobody can shorten it under a reader, which would end the reader with SIGBUS. It is not sealed against
    writing, since the actor writes; readers map it read-only by contract. Page-locked like ``PinnedStore``'s, for this
    process; filling it takes longer where the system has no huge pages for shared memory.
    """

    name = "shared"
    copy = Copy.HOST
    shared = True

    def __init__(self, runtime: Callable[[], Any] = cuda_runtime) -> None:
        self._locks = PageLocks("shmem_enabled", runtime)
        self._live = LiveBuffers()

    def allocate(self, nbytes: int) -> HostBuffer:
        # The kernel's own limit on memfds is the machine: beyond it processes are ended, nothing is refused.
        pages.require(nbytes, "a shared host buffer")
        fd = os.memfd_create("actor-lifecycle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        memory = None
        try:
            memory = _mapped(fd, nbytes)
            self._locks.note(move_near(memory))
            pages.populate(memory)
            locked = self._locks.lock(memory)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            if memory is not None:
                self._locks.unlock(memory)
            os.ftruncate(fd, 0)  # the exception may keep the mapping for a while
            os.close(fd)
            raise
        return self._live.add(nbytes, memory, fd, locked)

    def free(self, buffer: HostBuffer) -> None:
        self._live.remove(buffer)
        self._locks.unlock(buffer.memory)
        give_back(buffer)

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)

    def notes(self) -> tuple[str, ...]:
        """What was fallen back to so far, why, and what to do about it."""
        return self._locks.notes()


def _mapped(fd: int, nbytes: int) -> mmap:
    """A mapping of the empty memfd, grown to ``nbytes`` (at least 1), that wants huge pages. OSError if not.

    Its blocks are not there yet where populating the mapping makes them: blocks made beforehand would be small pages,
    by one thread.
    """
    if not pages.can_populate():
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    os.ftruncate(fd, max(nbytes, 1))
    memory = pages.aligned(lambda: mmap(fd, max(nbytes, 1)))
    pages.want_huge(memory)
    return memory


def give_back(buffer: HostBuffer) -> None:
    """Free the file's blocks, however many still map them (they read zeros from here on), and close the descriptor."""
    with suppress(OSError):  # a file system without holes: the blocks go with the last mapping
        pages.advise(buffer.memory, MADV_REMOVE)
    assert buffer.fd is not None
    os.close(buffer.fd)
