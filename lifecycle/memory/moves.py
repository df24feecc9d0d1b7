"""Where alias groups lie in a part and on the device, and how their bytes move between device and host memory.

Few and large copies are what reaches the link's speed, so a part mirrors the device: groups that are neighbours there
are neighbours in every copy, at the same distance, and both move as one *run*. See [Note: gaps].

[Note: gaps] torch's allocator gives out blocks of whole 512 bytes. Where less than that lies between two groups of one
segment of it, those bytes are the padding behind the first or what stands before the second in its storage: nobody
else's. So a run may copy them out, and back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.memory import aliases
from lifecycle.memory.streams import Lanes

BLOCK = 512  # bytes, ``kMinBlockSize`` of torch's CUDA caching allocator
CHUNK = 16 << 20  # bytes moved at once by an exchange: large enough for the link, small enough to overlap early

Segments = Sequence[tuple[int, int]]  # (address, end) of the allocator's segments, ascending
Allocator = Callable[[torch.device], Segments]


@frozen(eq=False)
class Placed:
    """One alias group with bytes: its names, its first byte in the part, and its bytes on the device as uint8."""

    names: frozenset[str]
    offset: int
    memory: Tensor

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@frozen(eq=False)
class Run:
    """Bytes that move as one: uint8 on the device, and the first one's offset in the part."""

    offset: int
    memory: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.memory.numel()


class _RawMemory:
    """Device memory by its address, in the one form that torch takes without a copy.

    https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def segments_of(device: torch.device) -> Segments:
    """The address ranges that torch's caching allocator has from the driver; none on a CPU or of another allocator."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return ()
    found = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    mine = (segment for segment in found if segment["device"] == device.index)
    return sorted((segment["address"], segment["address"] + segment["total_size"]) for segment in mine)


def offsets(groups: Sequence[aliases.AliasGroup], start: int, allocator: Allocator = segments_of) -> tuple[int, ...]:
    """Where each group starts, in bytes from ``start``, in a part that mirrors the device; last, where they end.

    ``start`` is where the part ended before. Groups are laid out by address, whatever their order: after less than
    ``BLOCK`` bytes where they are neighbours on the device, else at the next multiple of it.
    """
    places = [0] * len(groups)
    end, joins, before = start, _Neighbours(allocator), None
    memories = {index: aliases.extent(group) for index, group in enumerate(groups) if group.nbytes}
    for index in sorted(memories, key=lambda index: _position(memories[index])):
        memory = memories[index]
        if before is not None and joins(memories[before], memory):
            places[index] = places[before] + memory.data_ptr() - memories[before].data_ptr()
        else:
            places[index] = -(-end // BLOCK) * BLOCK
        end, before = places[index] + memory.numel(), index
    nbytes = -(-end // aliases.ALIGNMENT) * aliases.ALIGNMENT
    return (*(place - start if index in memories else 0 for index, place in enumerate(places)), nbytes - start)


def runs(placed: Iterable[Placed]) -> tuple[Run, ...]:
    """The fewest runs that cover these groups, by offset."""
    return tuple(_run(stretch) for stretch in stretches(placed))


def stretches(placed: Iterable[Placed], allocator: Allocator = segments_of) -> list[list[Placed]]:
    """The groups that can move as one run, together, by offset: neighbours in the part and on the device alike."""
    joins = _Neighbours(allocator)
    found: list[list[Placed]] = []
    for one in sorted(placed, key=lambda one: one.offset):
        last = found[-1][-1] if found else None
        if last and one.offset - last.offset == one.address - last.address and joins(last.memory, one.memory):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def copy_out(pieces: Iterable[Run], host: Tensor) -> None:
    """Enqueue copies of the runs to their places in ``host`` (uint8) on the current streams of their devices."""
    there, here = [], []
    for run in pieces:
        there.append(host.narrow(0, run.offset, run.memory.numel()))
        here.append(run.memory)
    _copy_all(there, here)


def copy_in(pieces: Iterable[Run], host: Tensor, nbytes: int) -> None:
    """Enqueue copies from ``host`` (uint8), of what lies in the part's first ``nbytes``, as ``copy_out`` does."""
    there, here = [], []
    for run in pieces:
        count = min(run.end, nbytes) - run.offset
        if count > 0:
            there.append(run.memory if run.end <= nbytes else run.memory.narrow(0, 0, count))
            here.append(host.narrow(0, run.offset, count))
    _copy_all(there, here)


def _copy_all(there: list[Tensor], here: list[Tensor]) -> None:
    """One call for all: from Python each copy takes longer to ask for than the link takes for a small tensor."""
    if there:
        torch._foreach_copy_(there, here, non_blocking=True)


def chunks(pieces: Iterable[Run], limit: int) -> Iterator[Run]:
    """The runs cut into pieces of at most ``limit`` bytes, in their order."""
    for run in pieces:
        for start in range(0, run.memory.numel(), limit):
            count = min(limit, run.memory.numel() - start)
            yield Run(run.offset + start, run.memory.narrow(0, start, count))


@define(eq=False)
class Swap:
    """One exchange of a part's bytes on the device with those of a host buffer, and how far it came.

    All bytes go to ``out``; the part's first ``nbytes`` come from ``into``. The old bytes of the first ``overwritten``
    pieces are in ``out`` (once what was enqueued has ended); those of all others are still on the device, whatever of
    them is in ``out`` too.
    """

    pieces: Sequence[Run]
    out: HostBuffer
    into: HostBuffer
    nbytes: int
    lanes: Lanes
    overwritten: int = 0

    def run(self) -> None:
        """Move everything both ways, in place. Complete on return; what was enqueued has ended also when it raises."""
        leaving, coming = tensor_over(self.out), tensor_over(self.into)
        self.lanes.follow()
        try:
            for index, piece in enumerate(self.pieces, 1):
                with self.lanes.out(piece.memory.device):
                    copy_out((piece,), leaving)
                if piece.offset < self.nbytes:
                    with self.lanes.into(piece.memory.device):
                        self.overwritten = index  # before the copy: it may be under way when the call raises
                        copy_in((piece,), coming, self.nbytes)
        finally:
            self.lanes.wait()

    def finish(self) -> int:
        """Complete ``out`` with what is still on the device; returns the bytes copied. May be called again."""
        self.lanes.wait()
        leaving, left = tensor_over(self.out), self.pieces[self.overwritten :]
        try:
            for piece in left:
                with self.lanes.out(piece.memory.device):
                    copy_out((piece,), leaving)
        finally:
            self.lanes.wait()
        return sum(piece.memory.numel() for piece in left)


class _Neighbours:
    """Tells whether a run may go on from one extent to another; asks the allocator only where it matters."""

    def __init__(self, allocator: Allocator) -> None:
        self._ask = allocator
        self._known: dict[torch.device, Segments] = {}

    def __call__(self, low: Tensor, high: Tensor) -> bool:
        distance = high.data_ptr() - low.data_ptr()
        return (
            low.device == high.device
            and 0 <= distance - low.numel() < BLOCK
            and distance % aliases.ELEMENT_ALIGNMENT == 0
            and self._one_segment(low, high)
        )

    def _one_segment(self, low: Tensor, high: Tensor) -> bool:
        if low.device not in self._known:
            self._known[low.device] = self._ask(low.device)
        segments = self._known[low.device]
        at = bisect_right(segments, (low.data_ptr(), 1 << 64)) - 1
        return at >= 0 and high.data_ptr() + high.numel() <= segments[at][1] and low.data_ptr() >= segments[at][0]


def _position(memory: Tensor) -> tuple[int, int]:
    return (memory.device.index or 0, memory.data_ptr())


def _run(stretch: Sequence[Placed]) -> Run:
    first, last = stretch[0], stretch[-1]
    if first is last:
        return Run(first.offset, first.memory)
    nbytes = last.offset + last.memory.numel() - first.offset
    raw = torch.as_tensor(_RawMemory(first.address, nbytes), device=first.memory.device)
    assert raw.data_ptr() == first.address, "torch copied device memory that it was to look at"
    return Run(first.offset, raw)
