"""The host: memory, pages, nodes and cores. Files are read below a root, so that tests may bring a tree of theirs."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from lifecycle.doctor.finding import Finding, in_words, note, ok, warning

_GIB = 1 << 30
_FEW_CORES = 4
_PAGES = "sys/kernel/mm/transparent_hugepage"


def huge_pages(root: Path) -> Finding:
    """Private host buffers are in huge pages where the kernel lets a process ask for them."""
    name, chosen = "huge pages", _chosen(root / _PAGES / "enabled")
    if chosen is None:
        return note(name, "this kernel has no transparent huge pages", "pinning host memory takes about twice as long")
    if chosen == "never":
        advice = f"echo madvise > /{_PAGES}/enabled: pinning host memory takes about half the time then"
        return warning(name, "never", advice)
    return ok(name, chosen)


def shared_huge_pages(root: Path) -> Finding:
    """Buffers that an engine can map are shared memory, whose pages have a switch of their own."""
    name, chosen = "huge pages, shared", _chosen(root / _PAGES / "shmem_enabled")
    if chosen in ("advise", "within_size", "always", "force"):
        return ok(name, chosen)
    advice = f"echo advise > /{_PAGES}/shmem_enabled: beside a GPU host='auto' is 'shared' then, which engines can map"
    return note(name, chosen or "this kernel has none", advice if chosen else "")


def locked_memory(limit: int) -> Finding:
    """``limit``: RLIMIT_MEMLOCK in bytes."""
    if limit in (resource.RLIM_INFINITY, -1):
        return ok("locked memory", "unlimited")
    advice = "where pinning is refused: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return note("locked memory", f"limited to {in_words(limit)}", advice)


def memory(available: int | Exception) -> Finding:
    """``available``: bytes as ``pages.available`` counts them, or what it raised."""
    if isinstance(available, Exception):
        return warning("host memory", f"can not be told: {available}", "pip install 'actor-lifecycle[torch]'")
    if available < _GIB:
        advice = "copies of sleeping actors need as much as their weights: raise the limit, or use host='disk:PATH'"
        return warning("host memory", f"{in_words(available)} available", advice)
    return ok("host memory", f"{in_words(available)} available")


def old_cgroups(root: Path) -> Finding | None:
    """A memory limit of cgroups version 1, which ``pages.available`` does not read."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            for group in (mount / path.lstrip("/"), mount):
                limit = _number(group / "memory.limit_in_bytes")
                if limit is not None and limit < 1 << 60:  # unlimited is written as a huge number
                    advice = "memory beyond it ends the process; limits of cgroups version 2 are taken into account"
                    return note("memory limit", f"{in_words(limit)}, by cgroups version 1", advice)
    return None


def nodes(root: Path) -> Finding:
    """NUMA nodes: a copy between a GPU and the other node's memory goes over the link between the nodes."""
    found = len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
    if found == 1:
        return ok("memory nodes", "1")
    advice = "host copies are put on the node of the GPU in use; start each rank there too: numactl --cpunodebind=NODE"
    return note("memory nodes", str(found), advice)


def cores(count: int, threads: int) -> Finding:
    """``count``: cores this process may use; ``threads``: how many of them fill host memory, by local ranks."""
    found = f"{count}, {threads} of them fill host memory"
    if threads < _FEW_CORES:
        return note("cores", found, "a first sleep is faster with more cores for each local rank")
    return ok("cores", found)


def shared_memory(total: int | None) -> Finding:
    """``total``: bytes of the file system at /dev/shm, or None where there is none."""
    if total is None or total < _GIB:
        advice = "docker run --shm-size=16g: NCCL and data loaders use it; host copies do not"
        return note("/dev/shm", "none" if total is None else in_words(total), advice)
    return ok("/dev/shm", in_words(total))


def memfd(refused: OSError | None) -> Finding:
    """``refused``: what making an anonymous file raised."""
    if refused is None:
        return ok("memfd", "available")
    return warning("memfd", str(refused), "use host='pinned': engines then get weights by a copy, not by mapping")


def gpus(root: Path) -> int:
    """How many devices the NVIDIA driver shows, whether torch can use them or not."""
    return len([path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def driver(root: Path) -> str | None:
    """The version of the NVIDIA kernel driver, where it is told."""
    for line in _lines(root / "sys/module/nvidia/version"):
        return line.strip()
    told = " ".join(_lines(root / "proc/driver/nvidia/version")[:1])
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", told)
    return found[0] if found else None


def _chosen(path: Path) -> str | None:
    """The word in brackets: "always [madvise] never" is "madvise"."""
    found = re.search(r"\[(\w+)\]", " ".join(_lines(path)))
    return found[1] if found else None


def _number(path: Path) -> int | None:
    text = " ".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
