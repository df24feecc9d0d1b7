"""What fingerprints cost: all weights of a Llama-like model, against torch's sums and a pinned copy of the same bytes.

Everything is measured in turn, round by round. On a CUDA device times are taken by its events, and ``whole`` also by
the clock; without one the same runs on the CPU, by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import asdict, field, frozen

from lifecycle.bench.shapes import llama_shapes
from lifecycle.fingerprint import Prepared, fingerprint, kernel_problem, prepare

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Enqueues work that is timed; what it returns is called afterwards, to wait for the results.
Job: TypeAlias = Callable[[], Callable[[], object] | None]

T = TypeVar("T")

_WARMUP = 3
_STAGE_BYTES = 1 << 30  # of pinned memory, through which the copy goes: allocating more would take seconds
_COMPARED_BYTES = 1 << 30  # that are fingerprinted on the CPU as well


@frozen
class FingerprintBench:
    """The result: medians in seconds over all rounds, and what was measured on what.

    ``device`` is the sums' time on the device, ``whole`` that of ``start()`` and ``read()`` by the clock, ``start``
    that of ``start()`` alone; ``sum_each`` an int64 sum of each tensor, ``sum_flat`` of one tensor of as many bytes;
    ``two_passes`` the way without Triton; ``copy_out`` a copy of as many bytes to pinned memory. ``over_sum_each`` and
    ``over_sum_flat`` are ``device`` divided by those; ``share_of_copy`` is ``whole`` divided by ``copy_out``.
    """

    device_s: float
    whole_s: float
    start_s: float
    sum_each_s: float
    sum_flat_s: float
    two_passes_s: float
    copy_out_s: float
    over_sum_each: float
    over_sum_flat: float
    share_of_copy: float
    first_prepare_s: float
    prepare_s: float
    gigabytes_per_s: float
    nbytes: int
    tensors: int
    rounds: int
    compared_bytes: int
    differing: tuple[str, ...]
    without_kernel: str | None
    device: str
    torch: str

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def measure(nbytes: int = 8 << 30, rounds: int = 20) -> FingerprintBench:
    """Measure ``rounds`` rounds over about ``nbytes`` of random bfloat16 weights, on the current CUDA device or a CPU.

    Takes twice the bytes on the device, and up to 1 GiB of pinned memory. ``differing`` names tensors, of the first
    GiB of them, whose fingerprint on the CPU is another one.
    """
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tensors = {name: _random(shape, device) for name, shape in llama_shapes(nbytes).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    first_prepare, _ = _clocked(lambda: prepare(tensors))
    prepare_s, prepared = _clocked(lambda: prepare(tensors))
    ours = _Ours(prepared)
    times = _interleaved(device, {"device": ours, **_peers(device, tensors, size)}, rounds)
    values, compared = prepared.start().read(), dict(_first(tensors, _COMPARED_BYTES))
    on_device, whole_s = times["device"], statistics.median(ours.whole[_WARMUP:])
    return FingerprintBench(
        device_s=on_device,
        whole_s=whole_s,
        start_s=statistics.median(ours.start[_WARMUP:]),
        sum_each_s=times["sum_each"],
        sum_flat_s=times["sum_flat"],
        two_passes_s=times["two_passes"],
        copy_out_s=times["copy_out"],
        over_sum_each=on_device / times["sum_each"],
        over_sum_flat=on_device / times["sum_flat"],
        share_of_copy=whole_s / times["copy_out"],
        first_prepare_s=first_prepare,
        prepare_s=prepare_s,
        gigabytes_per_s=size / on_device / 1e9,
        nbytes=size,
        tensors=len(tensors),
        rounds=rounds,
        compared_bytes=sum(tensor.nbytes for tensor in compared.values()),
        differing=tuple(name for name, tensor in compared.items() if fingerprint(tensor.cpu()) != values[name]),
        without_kernel=kernel_problem(device) if device.type == "cuda" else "not on a CUDA device",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
    )


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    import torch

    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    tensor.view(torch.uint8).random_(0, 256)
    return tensor


def _first(tensors: Mapping[str, Tensor], nbytes: int) -> Iterator[tuple[str, Tensor]]:
    """The first of the tensors, as many as have ``nbytes`` together."""
    left = nbytes
    for name, tensor in tensors.items():
        left -= tensor.nbytes
        if left < 0:
            return
        yield name, tensor


@frozen(eq=False)
class _Ours:
    """``start`` and ``read``, as two steps of which the first is timed on the device; both by the clock, in lists."""

    prepared: Prepared
    start: list[float] = field(factory=list)
    whole: list[float] = field(factory=list)

    def __call__(self) -> Callable[[], object]:
        began = time.perf_counter()
        started = self.prepared.start()
        self.start.append(time.perf_counter() - began)

        def read() -> None:
            started.read()
            self.whole.append(time.perf_counter() - began)

        return read


def _peers(device: torch.device, tensors: Mapping[str, Tensor], nbytes: int) -> dict[str, Job]:
    import torch

    each = [tensor.view(-1).view(torch.int64) for tensor in tensors.values()]
    flat = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 256)
    words = flat.view(torch.int64)
    stage = torch.empty(min(nbytes, _STAGE_BYTES), dtype=torch.uint8, pin_memory=device.type == "cuda")
    two_passes = prepare(tensors, kernel=False)

    def sum_each() -> None:
        for tensor in each:
            tensor.sum()

    def sum_flat() -> None:
        words.sum()

    def copy_out() -> None:
        for piece in torch.split(flat, len(stage)):
            stage[: len(piece)].copy_(piece, non_blocking=True)

    return {
        "sum_each": sum_each,
        "sum_flat": sum_flat,
        "two_passes": lambda: two_passes.start().read,
        "copy_out": copy_out,
    }


def _interleaved(device: torch.device, jobs: Mapping[str, Job], rounds: int) -> dict[str, float]:
    """Median seconds of each job, after a warm-up; which goes first changes from round to round."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    order = list(jobs)
    for _ in range(_WARMUP + rounds):
        for name in order:
            times[name].append(_timed(device, jobs[name]))
        order = [*order[1:], order[0]]
    return {name: statistics.median(found[_WARMUP:]) for name, found in times.items()}


def _timed(device: torch.device, job: Job) -> float:
    """Seconds that the job takes on the device, alone there."""
    import torch

    if device.type != "cuda":
        seconds, after = _clocked(job)
        if after is not None:
            after()
        return seconds
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    after = job()
    last.record()
    if after is not None:
        after()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _clocked(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result
