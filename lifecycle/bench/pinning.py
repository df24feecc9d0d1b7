"""How fast fresh host memory is page-locked: a private buffer of ours against ``cudaMallocHost``, a shared one beside.

Every allocation is cold: what it took is given back before the next. The machine's memory itself was touched before, as
a virtual machine's first use of a page is slow whoever asks for it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

from attrs import asdict, frozen

from lifecycle.errors import LifecycleError, MissingExtra
from lifecycle.hoststore.base import HostStore
from lifecycle.hoststore.locking import cuda_runtime, loaded_cudart
from lifecycle.memory import pages

_FEATURE = "lifecycle bench pinning"


@frozen
class Parts:
    """Seconds until a buffer of ours is there: mapped with every page populated, then registered with CUDA."""

    map_and_populate: float
    register: float

    @property
    def total(self) -> float:
        return self.map_and_populate + self.register


@frozen
class Round:
    """Seconds of one round."""

    private: Parts
    shared: Parts
    cuda_malloc_host: float


@frozen
class Pinning:
    """The result. Rates are medians in GiB/s; ``ratio`` is the private buffer's to ``cudaMallocHost``'s."""

    private_gib_s: float
    shared_gib_s: float
    cuda_malloc_host_gib_s: float
    ratio: float
    private_parts: Parts
    shared_parts: Parts
    rounds: tuple[Round, ...]
    nbytes: int
    threads: int
    huge_pages: str
    shared_huge_pages: str
    notes: tuple[str, ...]
    gpu: str
    torch: str

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def measure(nbytes: int = 8 << 30, rounds: int = 3) -> Pinning:
    """Allocate and free ``nbytes`` each way, ``rounds`` times, alternating which way goes first.

    Raises LifecycleError without a CUDA device, MemoryError where there is no room for one buffer.
    """
    torch, cudart = _cuda()
    from lifecycle.hoststore.pinned import PinnedStore
    from lifecycle.hoststore.shared import SharedStore

    pages.require(nbytes, _FEATURE)
    timed = _TimedRuntime(cuda_runtime())
    private, shared = PinnedStore(lambda: timed), SharedStore(lambda: timed)
    _warm_up(nbytes, cudart, private, shared)
    results = tuple(_round(nbytes, number, cudart, private, shared, timed) for number in range(rounds))
    cuda = _median(results, lambda one: one.cuda_malloc_host)
    ours = _median(results, lambda one: one.private.total)
    return Pinning(
        private_gib_s=_rate(nbytes, ours),
        shared_gib_s=_rate(nbytes, _median(results, lambda one: one.shared.total)),
        cuda_malloc_host_gib_s=_rate(nbytes, cuda),
        ratio=cuda / ours,
        private_parts=_median_parts([one.private for one in results]),
        shared_parts=_median_parts([one.shared for one in results]),
        rounds=results,
        nbytes=nbytes,
        threads=pages.populate_threads(),
        huge_pages=pages.huge_pages("enabled"),
        shared_huge_pages=pages.huge_pages("shmem_enabled"),
        notes=(*private.notes(), *shared.notes()),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
    )


def _cuda() -> tuple[Any, ctypes.CDLL]:
    """torch with a CUDA context, and the runtime library it uses."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(_FEATURE, "torch", "torch") from error
    if not torch.cuda.is_available():
        raise LifecycleError(
            f"{_FEATURE} measures page-locked memory, which needs a CUDA device: torch {torch.__version__} sees none "
            "here. Run it on a machine with one, with torch built for CUDA."
        )
    torch.zeros(1, device="cuda")
    cudart = loaded_cudart()
    if cudart is None:
        raise LifecycleError(f"{_FEATURE} compares with cudaMallocHost, and no libcudart.so is loaded in this process")
    cudart.cudaMallocHost.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
    cudart.cudaFreeHost.argtypes = (ctypes.c_void_p,)
    return torch, cudart


class _TimedRuntime:
    """torch's CUDA runtime; ``seconds`` is how long the last registration took."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.seconds = 0.0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        began = time.perf_counter()
        code = int(self._runtime.cudaHostRegister(address, nbytes, flags))
        self.seconds = time.perf_counter() - began
        return code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return int(self._runtime.cudaHostUnregister(address))


def _warm_up(nbytes: int, cudart: ctypes.CDLL, *stores: HostStore) -> None:
    """Touch the machine's memory once, and let every way do what it only does the first time."""
    memory = pages.anonymous(nbytes)
    pages.populate(memory)
    pages.drop(memory)
    few = min(nbytes, 64 << 20)
    for store in stores:
        store.free(store.allocate(few))
    _seconds_of_cuda(few, cudart)


def _round(
    nbytes: int, number: int, cudart: ctypes.CDLL, private: HostStore, shared: HostStore, timed: _TimedRuntime
) -> Round:
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("private", lambda: _parts_of_ours(nbytes, private, timed)),
        ("cuda_malloc_host", lambda: _seconds_of_cuda(nbytes, cudart)),
        ("shared", lambda: _parts_of_ours(nbytes, shared, timed)),
    ]
    return Round(**{name: way() for name, way in (reversed(ways) if number % 2 else ways)})


def _parts_of_ours(nbytes: int, store: HostStore, timed: _TimedRuntime) -> Parts:
    began = time.perf_counter()
    buffer = store.allocate(nbytes)
    whole = time.perf_counter() - began
    store.free(buffer)
    if not buffer.locked:
        raise LifecycleError(f"{_FEATURE}: CUDA did not page-lock {nbytes} bytes of the {store.name} store")
    return Parts(whole - timed.seconds, timed.seconds)


def _seconds_of_cuda(nbytes: int, cudart: ctypes.CDLL) -> float:
    pointer = ctypes.c_void_p()
    began = time.perf_counter()
    code = cudart.cudaMallocHost(ctypes.byref(pointer), nbytes)
    seconds = time.perf_counter() - began
    if code != 0:
        cudart.cudaGetLastError()  # or torch would raise it from the next kernel
        raise LifecycleError(f"{_FEATURE}: cudaMallocHost of {nbytes} bytes failed with CUDA error {code}")
    cudart.cudaFreeHost(pointer)
    return seconds


def _median(results: tuple[Round, ...], seconds: Callable[[Round], float]) -> float:
    return statistics.median(map(seconds, results))


def _median_parts(parts: list[Parts]) -> Parts:
    return Parts(
        statistics.median(part.map_and_populate for part in parts), statistics.median(part.register for part in parts)
    )


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / 2**30 / seconds
