"""Pages of the operating system: map, populate, drop, protect, count. Linux, through libc; knows no torch.

Calls go through ``ctypes`` where Python's own would hold the interpreter lock for as long as the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

HUGE = 2 << 20  # bytes of a huge page on x86-64 and on arm64 with 4 KiB pages
_WORTH_A_THREAD = 16 << 20  # bytes: zeroing them takes longer than starting a thread
_GAPS = 256  # between mappings that are long enough but not aligned: tried before one goes without, some µs each
_MADV_POPULATE_WRITE = 23  # Linux 5.14, https://man7.org/linux/man-pages/man2/madvise.2.html
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MBIND = {"x86_64": 237, "aarch64": 235}  # libc has no wrapper of its own for it
_MPOL_PREFERRED = 1
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.syscall.restype = ctypes.c_long
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc only


def anonymous(nbytes: int) -> mmap.mmap:
    """A private anonymous mapping of zeros, at least a page, in huge pages where the kernel has them, or OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = aligned(lambda: mmap.mmap(-1, max(nbytes, 1), flags=flags))
    with suppress(OSError):  # a kernel without transparent huge pages
        advise(memory, mmap.MADV_HUGEPAGE)
    return memory


def aligned(create: Callable[[], mmap.mmap]) -> mmap.mmap:
    """What ``create`` maps, starting at a huge page where it is long enough for one and the kernel goes along.

    A file's huge pages need it; of anonymous memory only the ends would be small pages. Kernels align some mappings by
    themselves, depending on version and length. Where this one did not, its place is given back, the misaligned end of
    it is kept occupied, and the kernel, which fills the highest gap from its top, puts the next mapping below that; or,
    where that gap is too small now, into the next one, about which the same is done.
    """
    with ExitStack() as kept:
        for _ in range(_GAPS):
            memory = create()
            start, excess = address(memory), address(memory) % HUGE
            if len(memory) < HUGE or excess == 0:
                return memory
            end = start + _whole(len(memory), mmap.PAGESIZE)
            memory.close()
            kept.enter_context(_occupied(end - excess, excess))
        return create()


@contextmanager
def _occupied(start: int, nbytes: int) -> Iterator[None]:
    """Nothing is mapped there meanwhile. If another thread was faster, so be it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    got = _libc.mmap(start, nbytes, _PROT_NONE, flags, -1, 0)
    try:
        yield
    finally:
        if got != _MAP_FAILED:
            _libc.munmap(got, nbytes)


def want_huge(file: mmap.mmap) -> None:
    """Ask for huge pages for a mapped file's whole huge pages, not for its end: there one would reach beyond the file.

    Without effect where ``huge_pages("shmem_enabled")`` says never.
    """
    whole = len(file) // HUGE * HUGE
    if whole:
        with suppress(OSError):  # a kernel without transparent huge pages
            _advise_range(address(file), whole, mmap.MADV_HUGEPAGE)


def huge_pages(
    kind: Literal["enabled", "shmem_enabled"], root: Path = Path("/sys/kernel/mm/transparent_hugepage")
) -> str:
    """The system's setting for huge pages in private ("enabled") or shared memory, in its own word, or "never"."""
    for file in (root / f"hugepages-{HUGE >> 10}kB" / kind, root / kind):
        chosen = re.search(r"\[(\w+)\]", file.read_text()) if file.exists() else None
        if chosen and chosen[1] != "inherit":
            return chosen[1]
    return "never"


def address(memory: mmap.mmap) -> int:
    """Where the mapping starts, in bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def advise(memory: mmap.mmap, advice: int) -> None:
    """``madvise`` of the whole mapping; OSError where the kernel refuses."""
    _advise_range(address(memory), len(memory), advice)


def populate(memory: mmap.mmap, threads: int | None = None) -> None:
    """Give every page of the mapping real memory now, so that no later write needs any. Contents may become zeros.

    Twice as fast as letting a copy fault the pages in one by one, and on several threads (``populate_threads()`` of
    them unless told otherwise) as fast as memory can be zeroed. OSError where there is no memory: some pages may have
    been populated then, and it is for the caller to drop them. Look with ``require`` first: beyond a cgroup's limit the
    kernel does not refuse but ends processes.
    """
    threads = populate_threads() if threads is None else threads
    # More slices than threads: a thread that shares its core holds nobody up.
    ranges = slices(address(memory), len(memory), 4 * threads if threads > 1 else 1)
    if threads == 1 or len(ranges) == 1:
        for start, nbytes in ranges:
            _populate_range(start, nbytes)
        return
    with ThreadPoolExecutor(min(threads, len(ranges)), "populate") as pool:
        for _ in pool.map(lambda piece: _populate_range(*piece), ranges):
            pass


def populate_threads(environment: Mapping[str, str] = os.environ) -> int:
    """This process's share of the cores it may use: those ÷ the ranks on this host as the launcher tells, or 1."""
    told = (environment.get(name, "") for name in _LOCAL_RANKS)
    ranks = next((int(text) for text in told if text.isdecimal() and int(text) > 0), 1)
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def slices(start: int, nbytes: int, wanted: int) -> list[tuple[int, int]]:
    """(start, nbytes) of about ``wanted`` slices that cover the range, cut at huge pages, none too small for a thread.

    Only the first and the last may be smaller, where the range's ends are no huge pages' ends.
    """
    size = _whole(max(-(-nbytes // wanted), _WORTH_A_THREAD), HUGE)
    cuts = (start, *range(start // HUGE * HUGE + size, start + nbytes, size), start + nbytes)
    return [(here, there - here) for here, there in pairwise(cuts)]


@cache
def can_populate() -> bool:
    """Whether this kernel populates on request, and then says so when there is no room; others have to touch pages."""
    try:
        advise(mmap.mmap(-1, 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


def prefer_node(memory: mmap.mmap, node: int) -> None:
    """Take the mapping's pages, which are not there yet, from a NUMA node as long as it has any.

    OSError where the kernel refuses, as in containers without CAP_SYS_NICE.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[-1] = 1 << node % 64
    limit = 64 * len(words) + 1  # the kernel looks at one bit less than it is told
    places = map(ctypes.c_ulong, (address(memory), _whole(len(memory), mmap.PAGESIZE), _MPOL_PREFERRED))
    _check(_libc.syscall(ctypes.c_long(number), *places, words, ctypes.c_ulong(limit), ctypes.c_ulong(0)))


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


def _populate_range(start: int, nbytes: int) -> None:
    try:
        _advise_range(start, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        ctypes.memset(start, 0, nbytes)  # an older kernel


def _advise_range(start: int, nbytes: int, advice: int) -> None:
    _check(_libc.madvise(start, nbytes, advice))


def _whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
