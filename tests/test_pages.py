"""Pages of the operating system: limits are read, and refusals of the kernel are errors."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from pathlib import Path

import psutil
import pytest

from lifecycle.memory import pages


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
