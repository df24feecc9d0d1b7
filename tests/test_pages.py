"""Pages of the operating system: limits are read, and refusals of the kernel are errors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, takewhile
from pathlib import Path

import psutil
import pytest

from lifecycle.memory import pages

MIB = 1 << 20


@pytest.fixture(name="cgroups")
def _cgroups(tmp_path: Path) -> Path:
    leaf = tmp_path / "pod" / "job"
    leaf.mkdir(parents=True)
    for group, limit in ((tmp_path / "pod", "1000000"), (leaf, "max")):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text("400000\n")
        (group / "memory.stat").write_text("anon 390000\ninactive_file 10000\n")
    return tmp_path


@pytest.mark.parametrize(
    ("membership", "room"),
    [
        ("0::/pod/job\n", 610_000),
        ("12:memory:/else\n0::/pod/job\n", 610_000),
        ("0::/../pod/job\n", None),
        ("0::/\n", None),
        ("4:memory:/pod/job\n", None),
        (None, None),
    ],
)
def test_the_tightest_cgroup_counts(cgroups: Path, membership: str | None, room: int | None):
    """The room in a cgroup or any above it bounds what is available; clean file pages count as free."""
    file = cgroups / "membership"
    if membership is not None:
        file.write_text(membership)

    found = pages.available(cgroups, file)

    assert (found == room) if room is not None else (found > 1 << 20)


def test_the_address_space_counts(monkeypatch: pytest.MonkeyPatch):
    """A limit on the address space bounds what is available, and is never exceeded into negative numbers."""
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used - 5, resource.RLIM_INFINITY))

    assert pages.available() == 0
    with pytest.raises(MemoryError, match="no room for a test: 7 bytes needed, 0 bytes available"):
        pages.require(7, "a test")


def test_populating_on_an_older_kernel(monkeypatch: pytest.MonkeyPatch):
    """Where the kernel does not know how to populate, the pages are touched instead."""
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    before = pages.resident_anonymous()
    memory = pages.anonymous(64 << 20)

    pages.populate(memory)

    assert pages.resident_anonymous() > before + (60 << 20)
    assert not any(memory[:4096])


def test_refusals_are_errors():
    """What the kernel refuses is an OSError with its number: unknown advice, pages with nothing behind them."""
    memory = pages.anonymous(4096)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        pages.advise(memory, 9999)
    assert caught.value.errno == errno.EINVAL
    fd = os.memfd_create("cut short")
    os.ftruncate(fd, 8192)
    file = mmap.mmap(fd, 8192)
    os.ftruncate(fd, 0)
    os.close(fd)
    with pytest.raises(OSError, match="Bad address"):
        pages.populate(file)


def test_dropped_pages_are_zeros():
    """A dropped mapping is still there, reads as zeros and can be written again; so can one that was read-only."""
    memory = pages.anonymous(4096)
    memory[0] = 7
    pages.drop(memory)
    assert memory[0] == 0
    pages.protect(memory, writable=False)
    pages.protect(memory, writable=True)
    memory[0] = 8
    assert memory[0] == 8


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch):
    """Huge pages are a wish, not a need."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)

    assert len(pages.anonymous(10)) == 10


def starts(memory: mmap.mmap) -> int:
    return pages.address(memory)


def resident(memory: mmap.mmap) -> list[bool]:
    """Of each small page of the mapping whether it is in memory, as the kernel tells."""
    count = -(-len(memory) // mmap.PAGESIZE)
    told = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(starts(memory)), ctypes.c_size_t(len(memory)), told) == 0
    return [bool(page & 1) for page in told]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_populating_on_several_threads(threads: int):
    """Every page of a mapping of odd length is there afterwards, none was before, and all of them read as zeros."""
    memory = pages.anonymous(50 * MIB + 12_345)
    assert not any(resident(memory))

    pages.populate(memory, threads)

    assert all(resident(memory))
    assert memory[:].count(0) == 50 * MIB + 12_345


def test_populating_a_file_on_several_threads():
    """A mapped memfd's blocks are all there afterwards."""
    fd = os.memfd_create("odd")
    os.ftruncate(fd, 40 * MIB + 5)
    file = pages.aligned(lambda: mmap.mmap(fd, 40 * MIB + 5))

    pages.populate(file, 3)

    assert os.fstat(fd).st_blocks * 512 >= 40 * MIB + mmap.PAGESIZE
    os.close(fd)


def test_one_slice_that_fails_fails_all():
    """When a slice in the middle has nothing behind it, the kernel's error is raised, whichever thread met it."""
    fd = os.memfd_create("cut short")
    os.ftruncate(fd, 80 * MIB)
    file = mmap.mmap(fd, 80 * MIB)
    os.ftruncate(fd, 40 * MIB)

    with pytest.raises(OSError, match="Bad address"):
        pages.populate(file, 4)
    os.close(fd)


@pytest.mark.parametrize("start", [0, pages.HUGE * 7, pages.HUGE * 7 + 4096, pages.HUGE * 8 - 4096])
@pytest.mark.parametrize("nbytes", [1, 4096, pages.HUGE, 16 * MIB, 100 * MIB + 1, 8192 * MIB, 8192 * MIB - 17])
@pytest.mark.parametrize("wanted", [1, 2, 16, 64])
def test_slices_cover_the_range(start: int, nbytes: int, wanted: int):
    """Slices touch each other, cover exactly the range, are cut at huge pages, and are as many as are worth it."""
    cut = pages.slices(start, nbytes, wanted)

    assert cut[0][0] == start
    assert sum(length for _, length in cut) == nbytes
    assert all(here + length == there for (here, length), (there, _) in pairwise(cut))
    assert all(here % pages.HUGE == 0 for here, _ in cut[1:])
    assert all(length > 0 for _, length in cut)
    assert all(length >= 16 * MIB for _, length in cut[1:-1])
    assert len(cut) <= wanted + 1


def test_slices_are_of_one_size():
    """8 GiB for 64 slices are 64 slices of 128 MiB; what one thread does in a moment is one slice."""
    assert {length for _, length in pages.slices(0, 8192 * MIB, 64)} == {128 * MIB}
    assert pages.slices(0, 16 * MIB, 64) == [(0, 16 * MIB)]


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "0", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "all"}, 1),
        ({"LOCAL_WORLD_SIZE": "1000"}, 16),
    ],
)
def test_threads_are_this_ranks_share(environment: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch):
    """16 cores are divided by the ranks on the host, as the launcher's own variable tells first; one is the least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    assert pages.populate_threads(environment) == 16 // ranks


@pytest.mark.parametrize("nbytes", [pages.HUGE, pages.HUGE + 1, 33 * MIB + 4097, 64 * MIB])
def test_large_mappings_start_at_a_huge_page(nbytes: int):
    """Private mappings and mapped files of at least a huge page start at one, and have the length asked for."""
    fd = os.memfd_create("aligned")
    os.ftruncate(fd, nbytes)
    kept = [pages.anonymous(4096)]  # whatever is mapped in between

    for create in (lambda: pages.anonymous(nbytes), lambda: pages.aligned(lambda: mmap.mmap(fd, nbytes))):
        kept.append(create())
        assert starts(kept[-1]) % pages.HUGE == 0
        assert len(kept[-1]) == nbytes
        kept[-1][nbytes - 1] = 1
    os.close(fd)


@contextmanager
def gaps_between(walls: int) -> Iterator[list[tuple[int, int]]]:
    """(start, nbytes) of gaps in the address space, longer than a huge page, none with room for an aligned one."""
    period, flags = 4 * pages.HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = pages._libc.mmap(None, (walls + 1) * period, pages._PROT_NONE, flags, -1, 0)
    first = -(-area // pages.HUGE) * pages.HUGE
    gaps = [(first + index * period + 4096, pages.HUGE + 4096 * index) for index in range(1, walls)]
    for gap in gaps:
        assert pages._libc.munmap(*gap) == 0
    yield gaps
    ends = [area, *(start + nbytes for start, nbytes in gaps)]
    starts_again = [*(start for start, _ in gaps), area + (walls + 1) * period]
    for start, end in zip(ends, starts_again, strict=True):
        assert pages._libc.munmap(start, end - start) == 0


def test_alignment_among_gaps_that_are_not():
    """Gaps that are long enough, but not from a huge page's start on, are offered by the kernel and not taken."""
    offered, made = [], []

    def create() -> mmap.mmap:
        memory = mmap.mmap(-1, pages.HUGE + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offered.append(starts(memory))
        return memory

    with gaps_between(64) as gaps:
        for _ in range(1000):  # gaps that lie higher are filled first
            made.append(pages.aligned(create))
            if any(start <= offer < start + nbytes for offer in offered for start, nbytes in gaps):
                break

    assert [starts(memory) % pages.HUGE for memory in made] == [0] * len(made)


def test_aligning_leaves_nothing_mapped():
    """The space that is kept occupied for a moment is free again."""
    before = psutil.Process().memory_info().vms
    memory = [pages.anonymous(pages.HUGE + 4096) for _ in range(50)]

    assert psutil.Process().memory_info().vms - before < 50 * (pages.HUGE + 8192) + MIB
    assert len(memory) == 50


def test_a_place_taken_by_another_thread(monkeypatch: pytest.MonkeyPatch):
    """When something else is mapped where the hole was, the mapping is made in the end, aligned or not."""
    taken = []

    def refuse(*arguments: object) -> int | None:
        taken.append(arguments)
        return pages._MAP_FAILED

    monkeypatch.setattr(pages._libc, "mmap", refuse)
    crooked = misaligned()
    monkeypatch.setattr(pages, "_GAPS", len(crooked) - 1)
    left = iter(crooked)
    memory = pages.aligned(lambda: next(left))

    assert len(taken) == len(crooked) - 1
    assert memory is crooked[-1]
    assert len(memory) == 2 * pages.HUGE + 4096
    memory[5] = 1


def misaligned() -> list[mmap.mmap]:
    """Mappings that do not start at a huge page, at least two."""
    nbytes = 2 * pages.HUGE + 4096
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = [mmap.mmap(-1, nbytes, flags=flags) for _ in range(4)]
    crooked = [memory for memory in made if starts(memory) % pages.HUGE]
    if len(crooked) < 2:
        pytest.skip("this kernel aligns every mapping by itself")
    return crooked


@pytest.mark.parametrize(
    ("of_this_size", "of_all", "setting"),
    [
        (None, "always [madvise] never", "madvise"),
        ("always [inherit] madvise never", "[always] madvise never", "always"),
        ("always inherit madvise [never]", "[always] madvise never", "never"),
        (None, None, "never"),
    ],
)
def test_the_systems_setting_for_huge_pages(of_this_size: str | None, of_all: str | None, setting: str, tmp_path: Path):
    """The setting for pages of 2 MiB counts where it does not inherit that of all sizes; no files, no huge pages."""
    (tmp_path / "hugepages-2048kB").mkdir()
    for folder, text in ((tmp_path / "hugepages-2048kB", of_this_size), (tmp_path, of_all)):
        if text is not None:
            (folder / "enabled").write_text(text + "\n")

    assert pages.huge_pages("enabled", tmp_path) == setting


@pytest.mark.skipif(pages.huge_pages("enabled") == "never", reason="huge pages are off here")
def test_private_memory_is_in_huge_pages():
    """Where the system allows them, nearly all of a populated private mapping is in huge pages: all but its end."""
    memory = pages.anonymous(32 * MIB + 4096)
    pages.populate(memory, 2)

    assert smaps(memory)["AnonHugePages"] >= 24 * MIB  # the kernel may be short of one or the other


def smaps(memory: mmap.mmap) -> dict[str, int]:
    """Bytes by kind, as the kernel counts them, of the area that starts where the mapping does."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{starts(memory):x}-"))
    area = takewhile(lambda line: re.match(r"\w+:", line), lines)
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in area if line.endswith(" kB")}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_memory_prefers_a_node():
    """The kernel has noted the node for the mapping; a node that there is not is an OSError."""
    memory = pages.anonymous(8192)
    pages.prefer_node(memory, 0)
    memory[0] = 1

    areas = Path("/proc/self/numa_maps").read_text().splitlines()
    assert [line.split()[1] for line in areas if line.startswith(f"{starts(memory):x} ")] == ["prefer:0"]
    with pytest.raises(OSError, match="Invalid argument"):
        pages.prefer_node(memory, 1000)


def test_an_unknown_machine_has_no_nodes(monkeypatch: pytest.MonkeyPatch):
    """Where the number of the kernel's call is not known, it is not called."""
    monkeypatch.setattr(platform, "machine", lambda: "vax")

    with pytest.raises(OSError, match="not implemented"):
        pages.prefer_node(pages.anonymous(4096), 0)


def test_whether_the_kernel_populates(monkeypatch: pytest.MonkeyPatch):
    """It is tried, not guessed from a version."""
    pages.can_populate.cache_clear()
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    assert not pages.can_populate()
    pages.can_populate.cache_clear()
