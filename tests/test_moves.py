"""How parts mirror the device, what moves as one, and exchanges that stop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.memory import aliases, moves
from lifecycle.memory.moves import BLOCK, Placed, Run, Swap
from lifecycle.memory.streams import Lanes, OwnStreams
from lifecycle.testing.fakes import FakeStore

CPU = torch.device("cpu")


def groups_in(memory: bytearray, extents: list[tuple[int, int]]) -> tuple[aliases.AliasGroup, ...]:
    """An alias group of its own for each (first byte, bytes) of the memory."""
    tensors = {
        f"t{first}": torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=first)
        for first, nbytes in extents
    }
    return aliases.alias_groups(tensors)


def aligned(memory: bytearray) -> int:
    """Where in the memory the first address lies that is a multiple of BLOCK."""
    return -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % BLOCK


def allocator(memory: bytearray, *bounds: tuple[int, int]) -> Callable[[torch.device], moves.Segments]:
    """An allocator whose segments are these (first byte, end) of the memory."""
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return lambda device: [(base + low, base + high) for low, high in bounds]


def test_neighbours_keep_their_distance():
    """What lies close by in one segment keeps its distance in the part, whatever the order of the names."""
    memory = bytearray(8192)
    start = aligned(memory)
    groups = groups_in(memory, [(start + 512, 88), (start + 2048, 40), (start, 100)])

    places = moves.offsets(groups, 64, allocator(memory, (0, 8192)))

    # from 512: 100 bytes, a gap, 88 bytes at 1024; then at the next block, 1536, 40 bytes; ends at a multiple of 64
    assert places == (1024 - 64, 1536 - 64, 512 - 64, 1600 - 64)


@pytest.mark.parametrize("bounds", [[], [(0, 1024), (1024, 8192)]], ids=["no segments", "two segments"])
def test_strangers_are_laid_out_block_by_block(bounds: list[tuple[int, int]]):
    """Close by, but not in one segment of the allocator: no run may span them, so each begins a block."""
    memory = bytearray(8192)
    groups = groups_in(memory, [(960, 64), (1040, 64)])

    assert moves.offsets(groups, 0, allocator(memory, *bounds)) == (0, 512, 576)


def test_odd_distances_are_not_mirrored():
    """A tensor that no element's alignment fits stays a run of its own: copies are read by whole elements."""
    memory = bytearray(8192)
    start = aligned(memory)
    groups = groups_in(memory, [(start, 100), (start + 120, 100)])

    assert moves.offsets(groups, 0, allocator(memory, (0, 8192))) == (0, 512, 640)


def test_tensors_without_elements_take_no_room():
    """They have a place in the part, and no byte of it."""
    groups = aliases.alias_groups({"empty": torch.empty(0, 3), "one": torch.ones(1)})

    assert moves.offsets(groups, 128) == (0, 512 - 128, 576 - 128)


@given(
    blocks=st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=12),
    cut=st.integers(0, 20_000),
    start=st.integers(0, 100).map(lambda n: n * 64),
)
def test_parts_mirror_what_the_allocator_allows(blocks: list[tuple[int, int, int]], cut: int, start: int):
    """Places never overlap and are aligned; what moves as one lies in one segment, at the same distances in both."""
    memory = bytearray(64 * 1024)
    first, extents = aligned(memory), []
    for nbytes, skipped, inside in blocks:  # a block of the allocator each, its tensor a little inside
        first += skipped * BLOCK
        extents.append((first + inside * 16, nbytes))
        first += -(-(inside * 16 + nbytes) // BLOCK) * BLOCK
    cut = aligned(memory) + cut // BLOCK * BLOCK
    ask = allocator(memory, (0, cut), (cut, len(memory)))
    groups = groups_in(memory, extents[::-1])

    *places, end = moves.offsets(groups, start, ask)

    placed = [
        Placed(frozenset(group.tensors), start + place, aliases.extent(group))
        for group, place in zip(groups, places, strict=True)
    ]
    ordered = sorted(placed, key=lambda one: one.offset)
    assert [one.address for one in ordered] == sorted(one.address for one in placed)
    assert all(one.offset % 16 == 0 for one in placed)
    assert ordered[-1].offset + ordered[-1].memory.numel() <= start + end
    for low, high in pairwise(ordered):
        assert low.offset + low.memory.numel() <= high.offset
    found = moves.stretches(placed, ask)
    assert [one for stretch in found for one in stretch] == ordered
    middle = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + cut
    for stretch in found:
        assert len({one.offset - one.address for one in stretch}) == 1
        assert len({one.address < middle for one in stretch}) == 1
    for before, after in pairwise(found):  # and no two of them could have been one
        gap = after[0].address - before[-1].address - before[-1].memory.numel()
        assert gap >= BLOCK or before[-1].address < middle <= after[0].address + after[0].memory.numel() - 1


def test_groups_that_moved_apart_are_runs_of_their_own():
    """After addresses changed, what no longer is neighbour on the device is copied by itself, to its old place."""
    low, high = torch.full((40,), 1, dtype=torch.uint8), torch.full((24,), 2, dtype=torch.uint8)
    placed = [Placed(frozenset({"high"}), 512, high), Placed(frozenset({"low"}), 0, low)]

    found = moves.runs(placed)

    assert [(run.offset, run.end) for run in found] == [(0, 40), (512, 536)]
    host = torch.zeros(1024, dtype=torch.uint8)
    moves.copy_out(found, host)
    assert host.nonzero().flatten().tolist() == [*range(40), *range(512, 536)]


@pytest.mark.parametrize(("offset", "together"), [(512, 1), (1024, 2)])
def test_only_equal_distances_move_as_one(offset: int, together: int):
    """Neighbours on the device are one run exactly where the part has them at that distance too."""
    memory = bytearray(8192)
    start = aligned(memory)
    low, high = (aliases.extent(group) for group in groups_in(memory, [(start, 40), (start + 512, 40)]))
    placed = [Placed(frozenset({"low"}), 0, low), Placed(frozenset({"high"}), offset, high)]

    assert len(moves.stretches(placed, allocator(memory, (0, 8192)))) == together


def part() -> tuple[list[Run], HostBuffer, HostBuffer]:
    """Runs of 100, 7 and 50 bytes, all ones; a buffer of zeros, and one of the bytes 2, 3, …"""
    runs = [Run(offset, torch.ones(size, dtype=torch.uint8)) for offset, size in [(0, 100), (512, 7), (1024, 50)]]
    out, into = (FakeStore().allocate(1088) for _ in range(2))
    tensor_over(into).copy_(torch.arange(1088) % 200 + 2)
    return runs, out, into


def expected(runs: list[Run], into: HostBuffer, nbytes: int) -> list[list[int]]:
    """What is on the device when the part's first ``nbytes`` came in."""
    whole = torch.cat([tensor_over(into)[:nbytes], torch.ones(1088 - nbytes, dtype=torch.uint8)])
    return [whole[run.offset : run.end].tolist() for run in runs]


def test_chunks_never_span_runs():
    """Runs are cut into pieces of at most the limit, in order, over the same bytes."""
    runs, _, _ = part()

    pieces = list(moves.chunks(runs, 32))

    assert [(piece.offset, piece.end) for piece in pieces] == [
        *[(0, 32), (32, 64), (64, 96), (96, 100)],
        (512, 519),
        *[(1024, 1056), (1056, 1074)],
    ]
    pieces[3].memory.fill_(9)
    assert runs[0].memory.tolist() == [1] * 96 + [9] * 4


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 515, 1024, 1060, 1088])
def test_no_byte_beyond_is_touched(nbytes: int):
    """A copy of the first bytes leaves the others as they are, also inside a run."""
    runs, _, into = part()

    moves.copy_in(runs, tensor_over(into), nbytes)

    assert [run.memory.tolist() for run in runs] == expected(runs, into, nbytes)


def swap(runs: list[Run], out: HostBuffer, into: HostBuffer, nbytes: int, lanes: Lanes | None = None) -> Swap:
    return Swap(tuple(moves.chunks(runs, 32)), out, into, nbytes, lanes or Lanes([CPU], OwnStreams()))


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 515, 1024, 1060, 1088])
def test_a_swap_takes_all_out_and_brings_the_first_bytes_in(nbytes: int):
    """Whatever comes in, all old bytes are out."""
    runs, out, into = part()

    swap(runs, out, into, nbytes).run()

    assert [run.memory.tolist() for run in runs] == expected(runs, into, nbytes)
    assert [tensor_over(out)[run.offset : run.end].unique().tolist() for run in runs] == [[1], [1], [1]]


class StopsAt(Lanes):
    """Raises at the ``left``-th use of one of the two streams, once."""

    def __init__(self, lane: str, left: int) -> None:
        super().__init__([CPU], OwnStreams())
        self.lane, self.left = lane, left

    def out(self, device: torch.device):
        self._count("out")
        return super().out(device)

    def into(self, device: torch.device):
        self._count("into")
        return super().into(device)

    def _count(self, lane: str) -> None:
        if lane == self.lane:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("lane", ["out", "into"])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_swap_stopped_between_chunks_can_be_finished(lane: str, at: int):
    """Chunks before the stop are exchanged, those behind it untouched; finishing brings out the old bytes of these."""
    runs, out, into = part()
    stopping = swap(runs, out, into, 1088, StopsAt(lane, at))

    with pytest.raises(KeyboardInterrupt):
        stopping.run()

    pieces = list(moves.chunks(runs, 32))
    assert not any(torch.equal(piece.memory, torch.ones_like(piece.memory)) for piece in pieces[: at - 1])
    assert all(torch.equal(piece.memory, torch.ones_like(piece.memory)) for piece in pieces[at - 1 :])
    assert stopping.finish() == sum(piece.memory.numel() for piece in pieces[at - 1 :])
    assert [tensor_over(out)[run.offset : run.end].unique().tolist() for run in runs] == [[1], [1], [1]]


def test_finishing_may_stop_too():
    """A finish that was stopped is called again."""
    runs, out, into = part()
    stopping = swap(runs, out, into, 1088, StopsAt("into", 2))
    with pytest.raises(KeyboardInterrupt):
        stopping.run()
    stopping.lanes = StopsAt("out", 3)
    with pytest.raises(KeyboardInterrupt):
        stopping.finish()

    stopping.finish()

    assert [tensor_over(out)[run.offset : run.end].unique().tolist() for run in runs] == [[1], [1], [1]]
