"""Pages of the operating system: map, populate, drop, protect, count. Linux, through libc; knows no torch.

Calls go through ``ctypes`` where Python's own would hold the interpreter lock for as long as the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14, https://man7.org/linux/man-pages/man2/madvise.2.html
_PROT_READ, _PROT_WRITE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc only


def anonymous(nbytes: int) -> mmap.mmap:
    """A private anonymous mapping of zeros, at least a page, in huge pages where the kernel has them, or OSError."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without transparent huge pages
        advise(memory, mmap.MADV_HUGEPAGE)
    return memory


def address(memory: mmap.mmap) -> int:
    """Where the mapping starts, in bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def advise(memory: mmap.mmap, advice: int) -> None:
    """``madvise`` of the whole mapping; OSError where the kernel refuses."""
    _check(_libc.madvise(address(memory), len(memory), advice))


def populate(memory: mmap.mmap) -> None:
    """Give every page of the mapping real memory now, so that no later write needs any. Contents may become zeros.

    Twice as fast as letting a copy fault the pages in one by one. OSError where there is no memory.
    """
    try:
        advise(memory, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        ctypes.memset(address(memory), 0, len(memory))  # an older kernel


def drop(memory: mmap.mmap) -> None:
    """Give back the pages of a private anonymous mapping; it reads as zeros from here on, at the same address."""
    advise(memory, mmap.MADV_DONTNEED)


def protect(memory: mmap.mmap, writable: bool) -> None:
    """Let the mapping be read and written, or only read: a write is then a segmentation fault."""
    _check(_libc.mprotect(address(memory), len(memory), _PROT_READ | (_PROT_WRITE if writable else 0)))


def trim() -> int:
    """Return the allocator's free memory to the system: by how many bytes resident anonymous memory fell.

    0 where the C library can not (anything but glibc).
    """
    before = resident_anonymous()
    if _malloc_trim is not None:
        _malloc_trim(0)
    return max(0, before - resident_anonymous())


def resident_anonymous() -> int:
    """Bytes of anonymous memory of this process that are really there (``RssAnon``)."""
    import psutil

    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def available(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process can still take: of the machine, of its cgroups (v2) and of its address space."""
    import psutil

    rooms = [int(psutil.virtual_memory().available), *_cgroup_rooms(cgroups, membership)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        rooms.append(limit - int(psutil.Process().memory_info().vms))
    return max(0, min(rooms))


def require(nbytes: int, purpose: str) -> None:
    """Raise MemoryError unless ``nbytes`` are available: touching pages that are not there can end the process."""
    room = available()
    if nbytes > room:
        raise MemoryError(f"no room for {purpose}: {nbytes} bytes needed, {room} bytes available")


def _cgroup_rooms(cgroups: Path, membership: Path) -> Iterator[int]:
    """What each memory limit on the way from this process's cgroup (v2) to the root leaves.

    Clean file pages count as free: the kernel takes them back before it refuses.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy != "0":
            continue
        leaf = Path(os.path.normpath(path.lstrip("/")))
        for group in (leaf, *leaf.parents):
            yield from _cgroup_room(cgroups / group)


def _cgroup_room(group: Path) -> Iterator[int]:
    limit = group / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    if text == "max":
        return
    counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    yield int(text) - int((group / "memory.current").read_text()) + int(counters.get("inactive_file", 0))


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
