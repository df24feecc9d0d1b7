"""Copies on disk, for hosts whose memory does not hold them: mapped files that no name leads to."""

from __future__ import annotations

import os
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory

from lifecycle.hoststore.base import HostBuffer
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.hoststore.shared import give_back
from states.resources import Copy


class DiskStore:
    """One unlinked file per buffer, in the file system of ``path``. Implements ``HostStore``.

    Only this user can open a file while it has a name (0600 in a directory of 0700), after that nobody can; a process
    that dies leaves nothing behind. Contents survive in the page cache and on disk, not a restart.
    """

    name = "disk"
    copy = Copy.DISK
    shared = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, naming the path, when files can not be made there."""
        self._path = Path(path)
        self._live = LiveBuffers()
        try:
            os.close(_nameless_file(self._path))
        except OSError as error:
            reason = f"the disk store can not make files there: {error.strerror}"
            raise OSError(error.errno, reason, str(self._path)) from error

    def allocate(self, nbytes: int) -> HostBuffer:
        fd = _nameless_file(self._path)
        try:
            memory = _reserved(fd, nbytes)
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

    def notes(self) -> tuple[str, ...]:
        """Nothing: files are not page-locked in the first place."""
        return ()


def _reserved(fd: int, nbytes: int) -> mmap:
    """A shared mapping of the empty file, grown to ``nbytes`` (at least 1) with every block allocated. OSError if not.

    A file only made longer would end the process with SIGBUS at the first write that finds no room.
    """
    os.posix_fallocate(fd, 0, max(nbytes, 1))
    return mmap(fd, max(nbytes, 1))


def _nameless_file(parent: Path) -> int:
    """A descriptor of a new file whose name and directory are gone again."""
    with TemporaryDirectory(prefix="actor-lifecycle-", dir=parent) as directory:
        return os.open(Path(directory) / "part", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
