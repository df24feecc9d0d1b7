"""The CPU's memory backend: every slot's bytes lie in page-aligned mappings of its own, so releasing is ``madvise``.

Theory of operation. A CPU tensor of torch's own can not be released in place: a storage resized to nothing ends the
process at the next operator, parameters read from files are private file mappings where dropping pages brings back
the *file's* bytes, and a tensor under a page gives nothing back. So ``adopt`` copies each alias group once into a
*segment*, a private anonymous mapping, and rebinds its tensors (``Tensor.data``) onto it. ``pause`` then drops the
segment's pages: addresses stay, storages stay, what is read is zeros.

Each group gets a storage object of its own over its slice of the segment: ``torch.save`` writes whole storages, and one
saved weight must not carry the arena along.

A segment is never unmapped by hand: it goes with the last storage over it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from mmap import mmap
from typing import Literal
from weakref import WeakSet

import torch
from attrs import evolve, field, frozen
from torch import Tensor, UntypedStorage

from lifecycle.errors import ManifestError
from lifecycle.fingerprint import fingerprints
from lifecycle.hoststore.base import HostBuffer
from lifecycle.manifest import PartLayout
from lifecycle.memory import aliases, pages
from lifecycle.memory.arrivals import Arrived
from lifecycle.memory.base import Holder, Incoming
from lifecycle.memory.holders import tensors_outside
from states.resources import SLOT_REGION, Region, Slot


@frozen(eq=False)
class Segment:
    """A mapping that holds the alias groups of one adoption, one after the other, at ``aliases.offsets``."""

    memory: mmap
    nbytes: int

    @property
    def address(self) -> int:
        return pages.address(self.memory)


@frozen(eq=False)
class _Placed:
    """Where the alias group of these names lies: in the part, and in memory."""

    names: frozenset[str]
    offset: int
    address: int
    nbytes: int


@frozen(eq=False)
class _Adopted:
    """What is known of one slot. ``addresses`` is where each tensor's first element was put."""

    region: Region
    layout: PartLayout
    segments: tuple[Segment, ...] = ()
    groups: tuple[_Placed, ...] = ()
    tensors: Mapping[str, Tensor] = field(factory=dict)
    addresses: Mapping[str, int] = field(factory=dict)


# Of all backends of this process: two actors must not move the same bytes.
_segments: WeakSet[Segment] = WeakSet()


class ArenaBackend:
    """Owns the bytes of one actor's CPU tensors. Implements ``MemoryBackend``; not thread-safe, like every backend.

    With ``poison`` (0 to 255) released regions are filled with that byte, at ``pause`` and again at ``resume``, so that
    bytes nobody restored can not pass for zeros or for luck. For tests: it takes the memory that ``pause`` gave back.
    """

    name = "arena"
    keeps_addresses = True
    stream_ordered = False
    overlaps = False

    def __init__(self, poison: int | None = None) -> None:
        self._poison = poison
        self._slots: dict[Slot, _Adopted] = {}
        self._paused: set[Region] = set()
        self._stopped: dict[Slot, tuple[HostBuffer, int]] = {}  # exchanges: what is out so far, in bytes

    def adopt(self, slot: Slot, region: Region, tensors: Mapping[str, Tensor]) -> PartLayout:
        """Copy the tensors' bytes into a new segment of the slot, rebind the tensors, and return the whole layout.

        Raises ManifestError for tensors that are not plain, strided, normal CPU tensors, whose storage a tensor outside
        ``tensors`` shares, or that another slot or actor owns already; MemoryError or OSError when there is no room for
        the second copy. Nothing was rebound then.
        """
        assert region not in self._paused, f"adopt into paused region {region}"
        before = self._adopted(slot, region)
        assert before.region == region, f"slot {slot} belongs to region {before.region}, not {region}"
        assert not before.tensors.keys() & tensors.keys(), f"slot {slot} has these names already"
        if not tensors:
            return before.layout
        # Tensors made in inference mode, or whose making autograd saw, could not stand in for parameters.
        with torch.inference_mode(False), torch.no_grad():
            aliases.refuse_unmovable(tensors, "cpu")
            groups = aliases.alias_groups(tensors)
            aliases.refuse_owned(groups, _owns)
            aliases.refuse_outsiders(groups)
            layout = aliases.extended(before.layout, groups)  # of offsets as they are before the move
            segment = _filled_segment(groups)
        self._slots[slot] = evolve(
            before,
            layout=layout,
            segments=(*before.segments, segment),
            groups=(*before.groups, *_placed(groups, before.layout.nbytes, segment)),
            tensors={**before.tensors, **tensors},
            addresses={**before.addresses, **{name: tensor.data_ptr() for name, tensor in tensors.items()}},
        )
        _segments.add(segment)
        return self._slots[slot].layout

    def forget(self, slot: Slot) -> None:
        self._slots.pop(slot, None)

    def layout(self, slot: Slot) -> PartLayout:
        return self._adopted(slot).layout

    def check(self) -> None:
        for slot in self._slots:
            self._refuse_moved(slot)

    def complete(self) -> None:
        """A segment holds nothing but what was adopted."""

    def pause(self, region: Region) -> int:
        """Drop the region's pages. Raises ManifestError, before any is dropped, when tensors were moved off them."""
        assert region not in self._paused, f"pause of paused region {region}"
        for slot, adopted in self._slots.items():
            if adopted.region == region:
                self._refuse_moved(slot)
        for segment in self._of_region(region):
            pages.drop(segment.memory)
        self._paused.add(region)
        self._fill_with_poison(region)
        return self._nbytes(region)

    def resume(self, region: Region) -> int:
        """Take the region's pages back, all of them now. MemoryError or OSError when there is no room: still paused."""
        assert region in self._paused, f"resume of resident region {region}"
        pages.require(self._nbytes(region), f"region {region}")
        for segment in self._of_region(region):
            pages.populate(segment.memory)
        self._fill_with_poison(region)
        self._paused.remove(region)
        return self._nbytes(region)

    def begin_resume(self, region: Region) -> None:
        """The system maps pages when they are touched."""

    def begin_copy_in(self, block: Sequence[Incoming]) -> None:
        """There is no resume that was begun."""

    def cancel_resume(self) -> None:
        """Nothing was begun."""

    def resident(self) -> frozenset[Region]:
        return frozenset(Region) - self._paused

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        """As ``MemoryBackend`` says. Raises ManifestError when tensors were moved off the arena."""
        self._to_copy(slot, buffer)
        nbytes = self._adopted(slot).layout.nbytes
        assert buffer.nbytes >= nbytes, f"buffer of {buffer.nbytes} bytes for {nbytes}"
        target = pages.address(buffer.memory)
        for offset, segment in self._placed(slot):
            ctypes.memmove(target + offset, segment.address, segment.nbytes)
        return nbytes

    def copy_in(self, slot: Slot, buffer: HostBuffer, nbytes: int) -> int:
        """As ``MemoryBackend`` says. Raises ManifestError when tensors were moved off the arena."""
        adopted = self._to_copy(slot, buffer, nbytes)
        source = pages.address(buffer.memory)
        for offset, segment in self._placed(slot):
            ctypes.memmove(segment.address, source + offset, max(0, min(segment.nbytes, nbytes - offset)))
        torch.autograd.graph.increment_version(list(adopted.tensors.values()))
        return nbytes

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[Arrived, ...]:
        return tuple(Arrived({one.slot: self._bring(one) for one in block}) for block in blocks)

    def exchange(self, slot: Slot, out: HostBuffer, into: HostBuffer, nbytes: int) -> int:
        """As ``MemoryBackend`` says, segment by segment."""
        adopted = self._to_copy(slot, into, nbytes)
        assert out.nbytes >= adopted.layout.nbytes, f"buffer of {out.nbytes} bytes for {adopted.layout.nbytes}"
        assert out is not into, "an exchange needs two buffers"
        target, source = pages.address(out.memory), pages.address(into.memory)
        torch.autograd.graph.increment_version(list(adopted.tensors.values()))
        self._stopped[slot] = out, 0
        for offset, address, size in self._exchanged(slot, "exchange"):
            ctypes.memmove(target + offset, address, size)
            self._stopped[slot] = out, offset + size
            ctypes.memmove(address, source + offset, max(0, min(size, nbytes - offset)))
        del self._stopped[slot]
        return adopted.layout.nbytes

    def finish_exchange(self, slot: Slot, out: HostBuffer) -> int:
        begun, done = self._stopped.get(slot, (out, 0))
        assert begun is out, f"the exchange of slot {slot} goes to another buffer"
        self._to_copy(slot, out)
        target, moved = pages.address(out.memory), 0
        for offset, address, size in self._exchanged(slot, "finish"):
            if offset >= done:
                ctypes.memmove(target + offset, address, size)
                moved += size
        self._stopped.pop(slot, None)
        return moved

    def _exchanged(self, slot: Slot, doing: Literal["exchange", "finish"]) -> Iterator[tuple[int, int, int]]:
        """(offset in the part, address, bytes) of what an exchange moves at a time."""
        for offset, segment in self._placed(slot):
            yield offset, segment.address, segment.nbytes

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        tensors = self._adopted(slot).tensors
        return fingerprints(tensors if names is None else {name: tensors[name] for name in names})

    def start_fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> Callable[[], Mapping[str, str]]:
        found = self.fingerprints(slot, names)
        return lambda: found

    def views(self, slot: Slot) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._adopted(slot).tensors.items()}

    def collect(self) -> int:
        return pages.trim()

    def available(self) -> int | None:
        return pages.available()

    def held(self) -> dict[Region, int]:
        regions = {adopted.region for adopted in self._slots.values()}
        return {region: 0 if region in self._paused else self._nbytes(region) for region in regions}

    def holders(self) -> tuple[Holder, ...]:
        mine = [(segment.address, segment.nbytes) for region in Region for segment in self._of_region(region)]
        return tensors_outside("cpu", mine)

    def _to_copy(self, slot: Slot, buffer: HostBuffer, nbytes: int = 0) -> _Adopted:
        """Refuse a copy that could not be right."""
        self._refuse_moved(slot)
        adopted = self._adopted(slot)
        assert nbytes <= min(buffer.nbytes, adopted.layout.nbytes), f"{nbytes} bytes are more than there are"
        assert adopted.region not in self._paused, f"copy to or from paused slot {slot}"
        return adopted

    def _bring(self, one: Incoming) -> dict[str, str]:
        if one.names is None:
            self.copy_in(one.slot, one.buffer, one.nbytes)
        else:
            adopted = self._to_copy(one.slot, one.buffer, one.nbytes)
            source = pages.address(one.buffer.memory)
            for group in adopted.groups:
                if not group.names.isdisjoint(one.names):
                    room = max(0, min(group.nbytes, one.nbytes - group.offset))
                    ctypes.memmove(group.address, source + group.offset, room)
            torch.autograd.graph.increment_version([adopted.tensors[name] for name in one.names])
        return self.fingerprints(one.slot, one.check)

    def _adopted(self, slot: Slot, region: Region | None = None) -> _Adopted:
        region = SLOT_REGION[slot] if region is None else region
        return self._slots.get(slot) or _Adopted(region, PartLayout(slot, region, 0))

    def _of_region(self, region: Region) -> list[Segment]:
        return [segment for adopted in self._slots.values() if adopted.region == region for segment in adopted.segments]

    def _nbytes(self, region: Region) -> int:
        return sum(segment.nbytes for segment in self._of_region(region))

    def _placed(self, slot: Slot) -> Iterator[tuple[int, Segment]]:
        """The slot's segments, each with its offset in the part."""
        offset = 0
        for segment in self._adopted(slot).segments:
            yield offset, segment
            offset += segment.nbytes

    def _fill_with_poison(self, region: Region) -> None:
        if self._poison is not None:
            for segment in self._of_region(region):
                ctypes.memset(segment.address, self._poison, segment.nbytes)

    def _refuse_moved(self, slot: Slot) -> None:
        """Raise ManifestError when a tensor no longer is where it was put: its slot's bytes are not its values then."""
        adopted = self._adopted(slot)
        moved = [name for name, tensor in adopted.tensors.items() if tensor.data_ptr() != adopted.addresses[name]]
        if moved:
            raise ManifestError(
                f"tensors of slot {slot} were rebound to other memory",
                moved,
                "Write into them (copy_) instead of assigning .data, and attach again after .to() or share_memory().",
            )


def _filled_segment(groups: Sequence[aliases.AliasGroup]) -> Segment:
    """A new segment with the groups' bytes, the groups' tensors rebound onto it."""
    *places, nbytes = aliases.offsets(groups)
    pages.require(nbytes, "the arena's copy of the tensors")
    segment = Segment(pages.anonymous(nbytes), nbytes)
    pages.populate(segment.memory)
    for group, place in zip(groups, places, strict=True):
        ctypes.memmove(segment.address + place, group.address, group.nbytes)
    storages = (_slice(segment.memory, place, group.nbytes) for group, place in zip(groups, places, strict=True))
    aliases.rebind(groups, storages)
    return segment


def _placed(groups: Sequence[aliases.AliasGroup], start: int, segment: Segment) -> Iterator[_Placed]:
    for group, place in zip(groups, aliases.offsets(groups), strict=False):
        yield _Placed(frozenset(group.tensors), start + place, segment.address + place, group.nbytes)


def _slice(memory: mmap, offset: int, nbytes: int) -> UntypedStorage:
    """A storage of its own over these bytes; it keeps the mapping alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def _owns(group: aliases.AliasGroup) -> bool:
    """Whether it lies in a segment of some actor's."""
    return any(segment.address <= group.address < segment.address + segment.nbytes for segment in _segments)
