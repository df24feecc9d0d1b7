"""Weights on their way to the device: who waits for which of them, and what was wrong with what came."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define, field

from lifecycle.errors import VerificationFailed
from lifecycle.memory.base import Incoming
from states.resources import SLOT_REGION, Region, Slot

if TYPE_CHECKING:
    from lifecycle.hoststore.base import HostBuffer
    from lifecycle.manifest import PartLayout
    from lifecycle.memory.base import Arrival
    from lifecycle.versions import Part


#: A part that comes, its copy, and the names of the tensors to fingerprint on arrival; None for all.
Coming = tuple["Part", "HostBuffer", Collection[str] | None]
#: By number of a block: the part's names that come with it, tensors that share bytes side by side.
Shares = Mapping[int, tuple[str, ...]]


def shares_of(layout: PartLayout, wanted: Sequence[frozenset[str]]) -> Shares:
    """The part's names by the number of the ``wanted`` block that they come with; those of no block with the first.

    Tensors that share bytes come together: with the block that names them, or with the first where several do.
    """
    place = {name: number for number, names in enumerate(wanted) for name in names}
    groups: dict[int, list[str]] = {}
    for spec in layout:
        groups.setdefault(spec.alias_group, []).append(spec.name)
    shares: dict[int, list[str]] = {}
    for group in groups.values():
        places = {place.get(name, 0) for name in group}
        shares.setdefault(places.pop() if len(places) == 1 else 0, []).extend(group)
    return {number: tuple(names) for number, names in shares.items()}


def blocks_of(coming: Mapping[Slot, Coming], shares: Mapping[Slot, Shares]) -> list[list[Incoming]]:
    """What comes with each block, by its number; nothing with some."""
    last = max((number for slot in coming for number in shares[slot]), default=0)
    blocks: list[list[Incoming]] = [[] for _ in range(last + 1)]
    for slot, (part, buffer, check) in coming.items():
        chosen = None if check is None else frozenset(check)
        for number, names in shares[slot].items():
            checked = names if chosen is None else tuple(name for name in names if name in chosen)
            blocks[number].append(Incoming(slot, buffer, part.nbytes, frozenset(names), checked))
    return blocks


@define
class Landings:
    """Arrivals by slot. ``blocks`` are those of a streamed wake, in order.

    An event that waits runs under the controller's lock; ``order`` and ``arrived`` are asked by forwards of any thread
    meanwhile, so nothing is forgotten before it has come.
    """

    _arrivals: dict[Slot, tuple[Part, tuple[Arrival, ...]]] = field(factory=dict)
    _blocks: tuple[Arrival, ...] = ()
    _parts: dict[Slot, Part] = field(factory=dict)  # that come with the blocks
    _seen: set[int] = field(factory=set)

    def expect(self, slot: Slot, part: Part, arrivals: Sequence[Arrival]) -> None:
        self._arrivals[slot] = part, tuple(arrivals)
        if _is_weights(slot):
            self._blocks = ()

    def expect_blocks(self, arrivals: Sequence[Arrival]) -> None:
        """What is expected in weights slots comes with these."""
        self._parts = {slot: part for slot, (part, _) in self._arrivals.items() if _is_weights(slot)}
        self._blocks, self._seen = tuple(arrivals), set()

    @property
    def coming(self) -> frozenset[Slot]:
        """Slots whose bytes nobody has waited for."""
        return frozenset(self._arrivals)

    @property
    def streamed(self) -> bool:
        return bool(self._blocks)

    def order(self) -> None:
        """What the caller's stream launches from here on sees the weights; of a streamed wake, nothing is ordered."""
        if not self._blocks:
            for slot, (_, arrivals) in tuple(self._arrivals.items()):
                if _is_weights(slot):
                    for arrival in arrivals:
                        arrival.order()

    def first(self) -> None:
        """Wait for the first block. Raises VerificationFailed, naming the tensors, and what the copy raised."""
        if not self.arrived(0):
            for slot, tensors in self._blocks[0].wait().items():
                _refuse_wrong(slot, self._parts[slot], tensors)

    def arrived(self, number: int) -> bool:
        """Wait for this block, once; whether it is what it should be: the copy did not fail, and no tensor differs."""
        blocks = self._blocks
        if number in self._seen or number >= len(blocks):
            return True
        try:
            found = blocks[number].wait()
        except Exception:
            return False  # whoever waits for all of them hears why
        if any(_wrong(self._parts[slot], tensors) for slot, tensors in found.items()):
            return False
        self._seen.add(number)
        return True

    def wait(self, slot: Slot) -> None:
        """Wait for all of the slot. Raises VerificationFailed, naming the tensors, and what the copy raised.

        Blocks with something wrong in them stay wrong until they are forgotten.
        """
        part, arrivals = self._arrivals[slot]
        got: dict[str, str] = {}
        try:
            for arrival in arrivals:
                got |= arrival.wait().get(slot, {})
            _refuse_wrong(slot, part, got)
        except BaseException:
            self._arrivals.pop(slot, None)
            raise
        self.forget([slot])

    def forget(self, slots: Collection[Slot]) -> None:
        """What was on its way there is of no interest any more."""
        for slot in slots:
            self._arrivals.pop(slot, None)
        if not any(map(_is_weights, self._arrivals)):
            self._blocks = ()

    def land(self) -> None:
        """Wait for everything, whatever it is: what came, or did not, is measured where it lies."""
        for _, arrivals in self._arrivals.values():
            for arrival in arrivals:
                with suppress(Exception):
                    arrival.wait()
        self.forget(tuple(self._arrivals))


def _is_weights(slot: Slot) -> bool:
    return SLOT_REGION[slot] is Region.WEIGHTS


def _wrong(part: Part, got: Mapping[str, str]) -> list[str]:
    return [name for name, value in got.items() if part.tensors[name] != value]


def _refuse_wrong(slot: Slot, part: Part, got: Mapping[str, str]) -> None:
    if wrong := _wrong(part, got):
        expected = {name: part.tensors[name] for name in wrong}
        raise VerificationFailed(f"restored {slot}", expected, {name: got[name] for name in wrong})
