"""How fast memory of this machine is filled, pinned, copied and fingerprinted: seconds of work, a few hundred MiB."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from types import ModuleType

from lifecycle.doctor.finding import Finding, Section, Status, note, warning
from lifecycle.errors import LifecycleError
from lifecycle.memory import pages

_NBYTES = 256 << 20
_PINNED = 1 << 30  # less is over too soon to be told from its fixed costs
_ROUNDS = 3
_UNIT = "GB/s"

#: Name of what is measured, and how: each gives findings.
_Measurement = tuple[str, Callable[[], Iterator[Finding]]]


def measure(torch: ModuleType | Exception, cuda: bool, tell: Callable[[str], None]) -> Section:
    """Each speed as a finding with its value in GB/s (10⁹ bytes); ``tell`` hears what is measured, beforehand.

    What can not be measured is a finding that says why.
    """
    findings: list[Finding] = []
    for name, run in _measurements(torch, cuda):
        tell(name)
        try:
            findings.extend(run())
        except (LifecycleError, ImportError, MemoryError, OSError, RuntimeError) as error:
            text = str(error).partition("\n")[0]
            findings.append(warning(name, f"not measured: {text}", "see what takes the memory, or use --no-measure"))
    return Section("speed", tuple(findings))


def _measurements(torch: ModuleType | Exception, cuda: bool) -> Iterator[_Measurement]:
    yield "filling host memory", _filling
    yield "copying in host memory", _copying
    if isinstance(torch, Exception):
        return
    module = torch
    if cuda:
        yield "pinning", _pinning
        yield "copying between host and device", lambda: _link(module)
    yield "fingerprint", lambda: _fingerprint(module, "cuda" if cuda else "cpu")


def _filling() -> Iterator[Finding]:
    """Giving fresh host memory its pages: what a first sleep does before it copies."""
    nbytes = _affordable(1)

    def fill() -> float:
        memory = pages.anonymous(nbytes)
        return _seconds(lambda: pages.populate(memory))

    yield _speed("filling host memory", nbytes, median(fill() for _ in range(_ROUNDS)))


def _copying() -> Iterator[Finding]:
    nbytes = _affordable(2)
    source, target = (pages.anonymous(nbytes) for _ in range(2))
    pages.populate(source)
    pages.populate(target)
    copy = partial(ctypes.memmove, pages.address(target), pages.address(source), nbytes)
    yield _speed("copying in host memory", nbytes, median(_seconds(copy) for _ in range(_ROUNDS)))


def _pinning() -> Iterator[Finding]:
    """Page-locking fresh memory, as a first sleep does, against the CUDA runtime's own way to allocate it."""
    from lifecycle.bench.pinning import measure

    found = measure(_affordable(1, _PINNED), _ROUNDS)
    for name, gib_s in (
        ("pinning, host='pinned'", found.private_gib_s),
        ("pinning, host='shared'", found.shared_gib_s),
        ("pinning, cudaMallocHost", found.cuda_malloc_host_gib_s),
    ):
        yield _speed(name, 1 << 30, 1 / gib_s)
    if found.ratio < 1:
        times = f"host='pinned' is {found.ratio:.1f} times as fast as cudaMallocHost"
        yield warning("pinning", times, "see huge pages and cores above")
    yield from (note("pinning", text) for text in found.notes)


def _link(torch: ModuleType) -> Iterator[Finding]:
    """Plain copies of page-locked memory, the limit for every sleep and wake: each way alone, then both at once."""
    nbytes = _affordable(2)
    there, here = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    out_of, into = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_out() -> None:
        with torch.cuda.stream(streams[0]):
            into.copy_(there, non_blocking=True)

    def copy_in() -> None:
        with torch.cuda.stream(streams[1]):
            here.copy_(out_of, non_blocking=True)

    def both() -> None:
        copy_out()
        copy_in()

    for name, run, moved in (
        ("device to host", copy_out, nbytes),
        ("host to device", copy_in, nbytes),
        ("both ways at once", both, 2 * nbytes),
    ):
        yield _speed(name, moved, _on_device(torch, run))


def _fingerprint(torch: ModuleType, device: str) -> Iterator[Finding]:
    from lifecycle.fingerprint import fingerprint

    nbytes = _affordable(1)
    look = partial(fingerprint, torch.ones(nbytes // 8, dtype=torch.int64, device=device))
    seconds = _on_device(torch, look) if device == "cuda" else median(_seconds(look) for _ in range(_ROUNDS))
    yield _speed(f"fingerprint on {device}", nbytes, seconds)


def _on_device(torch: ModuleType, run: Callable[[], object]) -> float:
    """Median seconds until the device has done it; a first run, which may compile or map something, is left out."""

    def whole() -> None:
        run()
        torch.cuda.synchronize()

    whole()
    return median(_seconds(whole) for _ in range(_ROUNDS))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _affordable(buffers: int, wanted: int = _NBYTES) -> int:
    """Bytes for each of so many buffers of host memory: all of them take an eighth of what is available at most."""
    try:
        room = pages.available() // 8 // buffers
    except ImportError:  # psutil
        room = _NBYTES
    return max(1 << 20, min(wanted, room & -(1 << 20)))


def _speed(name: str, nbytes: int, seconds: float) -> Finding:
    value = nbytes / seconds / 1e9
    return Finding(name, Status.OK, f"{value:.1f} {_UNIT}", value=value, unit=_UNIT)
