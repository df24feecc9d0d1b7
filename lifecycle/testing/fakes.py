"""Fakes of the interfaces: small, strict, and recording what they were asked."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from lifecycle.fingerprint import fingerprints
from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.hoststore.live import LiveBuffers
from lifecycle.manifest import PartLayout
from lifecycle.memory import aliases
from lifecycle.memory.arrivals import Arrived
from lifecycle.memory.base import Holder, Incoming
from states.resources import SLOT_REGION, Copy, Region, Slot


@frozen(eq=False)
class _Held:
    """One slot: its layout, and each alias group with its offset in the part."""

    layout: PartLayout
    tensors: Mapping[str, Tensor] = field(factory=dict)
    groups: tuple[tuple[int, aliases.AliasGroup], ...] = ()


class FakeMemory:
    """A ``MemoryBackend`` that leaves tensors where they are: ``pause`` overwrites them with the poison byte.

    Whatever is not restored after ``resume`` therefore stays poison. ``calls`` records every call that changes or moves
    bytes, as (method, slot or region). ``free_bytes`` is what ``available`` answers.
    """

    name = "fake"
    keeps_addresses = True
    stream_ordered = False
    overlaps = False

    def __init__(self, poison: int = 0xCB, free_bytes: int | None = None) -> None:
        self.poison = poison
        self.free_bytes = free_bytes
        self.calls: list[tuple[str, str]] = []
        self._slots: dict[Slot, _Held] = {}
        self._stopped: set[Slot] = set()  # exchanges that had copied everything out
        self._paused: set[Region] = set()

    def adopt(self, slot: Slot, region: Region, tensors: Mapping[str, Tensor]) -> PartLayout:
        assert region not in self._paused, f"adopt into paused region {region}"
        groups = aliases.alias_groups(tensors)
        aliases.refuse_outsiders(groups)
        self.calls.append(("adopt", slot))
        before = self._slots.get(slot) or _Held(PartLayout(slot, region, 0))
        places = [before.layout.nbytes + offset for offset in aliases.offsets(groups)]
        self._slots[slot] = evolve(
            before,
            layout=aliases.extended(before.layout, groups),
            tensors={**before.tensors, **tensors},
            groups=(*before.groups, *zip(places, groups, strict=False)),
        )
        return self._slots[slot].layout

    def forget(self, slot: Slot) -> None:
        self.calls.append(("forget", slot))
        self._slots.pop(slot, None)

    def layout(self, slot: Slot) -> PartLayout:
        return self._held(slot).layout

    def check(self) -> None:
        """Tensors lie where their owner put them."""

    def complete(self) -> None:
        """Nothing else lies in the tensors themselves."""

    def pause(self, region: Region) -> int:
        assert region not in self._paused, f"pause of paused region {region}"
        self.calls.append(("pause", region))
        for held in self._of_region(region):
            for _, group in held.groups:
                aliases.extent(group).fill_(self.poison)
        self._paused.add(region)
        return self._nbytes(region)

    def resume(self, region: Region) -> int:
        assert region in self._paused, f"resume of resident region {region}"
        self.calls.append(("resume", region))
        self._paused.remove(region)
        return self._nbytes(region)

    def begin_resume(self, region: Region) -> None:
        assert region in self._paused, f"begun with region {region}, which is resident"

    def begin_copy_in(self, block: Sequence[Incoming]) -> None: ...

    def cancel_resume(self) -> None: ...

    def resident(self) -> frozenset[Region]:
        return frozenset(Region) - self._paused

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        held = self._touched(slot)
        self.calls.append(("copy_out", slot))
        assert buffer.nbytes >= held.layout.nbytes, f"buffer of {buffer.nbytes} bytes for {held.layout.nbytes}"
        target = tensor_over(buffer)
        for offset, group in held.groups:
            target[offset : offset + group.nbytes].copy_(aliases.extent(group))
        return held.layout.nbytes

    def copy_in(self, slot: Slot, buffer: HostBuffer, nbytes: int) -> int:
        held = self._touched(slot)
        self.calls.append(("copy_in", slot))
        assert nbytes <= min(buffer.nbytes, held.layout.nbytes), f"{nbytes} bytes are more than there are"
        source = tensor_over(buffer)[:nbytes]
        for offset, group in held.groups:
            piece = source[offset : offset + group.nbytes]
            aliases.extent(group)[: piece.numel()].copy_(piece)
        torch.autograd.graph.increment_version(list(held.tensors.values()))
        return nbytes

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[Arrived, ...]:
        return tuple(Arrived({one.slot: self._bring(one) for one in block}) for block in blocks)

    def _bring(self, one: Incoming) -> dict[str, str]:
        held = self._touched(one.slot)
        source = tensor_over(one.buffer)[: one.nbytes]
        self.calls.append(("start_copy_in", one.slot))
        for offset, group in held.groups:
            if one.names is None or not one.names.isdisjoint(group.tensors):
                piece = source[offset : offset + group.nbytes]
                aliases.extent(group)[: piece.numel()].copy_(piece)
                torch.autograd.graph.increment_version(list(group.tensors.values()))
        return self.fingerprints(one.slot, one.check)

    def exchange(self, slot: Slot, out: HostBuffer, into: HostBuffer, nbytes: int) -> int:
        moved = self.copy_out(slot, out)
        self._stopped.add(slot)
        self.copy_in(slot, into, nbytes)
        self._stopped.remove(slot)
        return moved

    def finish_exchange(self, slot: Slot, out: HostBuffer) -> int:
        if slot not in self._stopped:
            return self.copy_out(slot, out)
        self._stopped.remove(slot)
        return 0

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        tensors = self._held(slot).tensors
        return fingerprints(tensors if names is None else {name: tensors[name] for name in names})

    def start_fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> Callable[[], Mapping[str, str]]:
        found = self.fingerprints(slot, names)
        return lambda: found

    def views(self, slot: Slot) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._held(slot).tensors.items()}

    def collect(self) -> int:
        self.calls.append(("collect", ""))
        return 0

    def available(self) -> int | None:
        return self.free_bytes

    def held(self) -> dict[Region, int]:
        regions = {held.layout.region for held in self._slots.values()}
        return {region: 0 if region in self._paused else self._nbytes(region) for region in regions}

    def holders(self) -> tuple[Holder, ...]:
        return ()

    def _held(self, slot: Slot) -> _Held:
        return self._slots.get(slot) or _Held(PartLayout(slot, SLOT_REGION[slot], 0))

    def _touched(self, slot: Slot) -> _Held:
        held = self._held(slot)
        assert held.layout.region not in self._paused, f"copy to or from paused slot {slot}"
        return held

    def _of_region(self, region: Region) -> list[_Held]:
        return [held for held in self._slots.values() if held.layout.region == region]

    def _nbytes(self, region: Region) -> int:
        return sum(held.layout.nbytes for held in self._of_region(region))


class FakeStore:
    """A ``HostStore`` over plain mappings whose ``fail_at``-th allocation (counted from 1) raises OSError, once.

    ``calls`` records (method, nbytes).
    """

    name = "fake"
    copy = Copy.HOST
    shared = False

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.calls: list[tuple[str, int]] = []
        self._asked = 0
        self._live = LiveBuffers()

    def allocate(self, nbytes: int) -> HostBuffer:
        self._asked += 1
        self.calls.append(("allocate", nbytes))
        if self._asked == self.fail_at:
            raise OSError(f"allocation {self._asked} fails, as asked")
        return self._live.add(nbytes, mmap.mmap(-1, max(nbytes, 1)))

    def free(self, buffer: HostBuffer) -> None:
        self.calls.append(("free", buffer.nbytes))
        self._live.remove(buffer)

    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        for buffer in self._live.all():
            self.free(buffer)
