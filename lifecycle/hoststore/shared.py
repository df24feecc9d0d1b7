"""Host memory that other processes of this host can map: a rollout engine copies straight from the actor's copy."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from mmap import MADV_REMOVE, mmap

from lifecycle.hoststore.base import HostBuffer
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.memory import pages
from states.resources import Copy

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SharedStore:
    """One ``memfd`` per buffer, exactly ``nbytes`` long. Implements ``HostStore``.

    ``HostBuffer.fd`` is closed on exec and lives until ``free``; pass it on with ``socket.send_fds``. Its size is
    sealed: nobody can shorten it under a reader, which would end the reader with SIGBUS. It is not sealed against
    writing, since the actor writes; readers map it read-only by contract.
    """

    name = "shared"
    copy = Copy.HOST
    shared = True

    def __init__(self) -> None:
        self._live = LiveBuffers()

    def allocate(self, nbytes: int) -> HostBuffer:
        # The kernel's own limit on memfds is the machine: beyond it processes are ended, nothing is refused.
        pages.require(nbytes, "a shared host buffer")
        fd = os.memfd_create("actor-lifecycle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            memory = reserved(fd, nbytes)
            pages.populate(memory)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return self._live.add(nbytes, memory, fd)

    def free(self, buffer: HostBuffer) -> None:
        self._live.remove(buffer)
        give_back(buffer)

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)


def reserved(fd: int, nbytes: int) -> mmap:
    """A shared mapping of the empty file, grown to ``nbytes`` (at least 1) with every block allocated. OSError if not.

    A file only made longer would end the process with SIGBUS at the first write that finds no room.
    """
    os.posix_fallocate(fd, 0, max(nbytes, 1))
    return mmap(fd, max(nbytes, 1))


def give_back(buffer: HostBuffer) -> None:
    """Free the file's blocks, however many still map them (they read zeros from here on), and close the descriptor."""
    with suppress(OSError):  # a file system without holes: the blocks go with the last mapping
        pages.advise(buffer.memory, MADV_REMOVE)
    assert buffer.fd is not None
    os.close(buffer.fd)
