"""A backend for the CPU on which bytes are late and exchanges can be stopped, as on a device with streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lifecycle.hoststore.base import HostBuffer
from lifecycle.manifest import PartLayout
from lifecycle.memory import pages
from lifecycle.memory.arena import ArenaBackend
from lifecycle.memory.base import Incoming
from lifecycle.testing.trouble import TightArena
from states.resources import Region, Slot


class Late:
    """An ``Arrival`` whose bytes come when somebody asks for them. ``waited`` counts for how many it was waited."""

    def __init__(self, come: Callable[[], Mapping[Slot, Mapping[str, str]]]) -> None:
        self._come, self._lock = come, threading.RLock()  # asked for by any thread
        self._found: Mapping[Slot, Mapping[str, str]] | None = None
        self._error: Exception | None = None
        self.waited = 0

    @property
    def ended(self) -> bool:
        return self._found is not None or self._error is not None

    def order(self) -> None:
        """The bytes come now, or fail to, which only a wait tells."""
        with self._lock:
            if not self.ended:
                try:
                    self._found = self._come()
                except Exception as error:
                    self._error = error

    def wait(self) -> Mapping[Slot, Mapping[str, str]]:
        self.order()
        self.waited += 1
        if self._error is not None:
            raise RuntimeError(*self._error.args)
        assert self._found is not None
        return self._found


class LateArena(ArenaBackend):
    """The arena as a device with streams would be: who reads what was not ordered or waited for reads poison.

    ``start_copy_in`` fills all that is to come with ``late`` (a byte); each arrival brings its own when it is asked to,
    from what its buffer holds then. Arrivals are numbered from 0 in the order in which they were started (``started``
    counts them): those in ``failing`` raise RuntimeError and bring nothing, those in ``flipping`` bring one bit wrong.
    Exchanges go by chunks of ``chunk`` bytes; ``at_chunk`` is called with "exchange" or "finish" and a number before
    each, and once after the last; whatever it raises stops them there.
    """

    name = "late_arena"
    stream_ordered = True
    overlaps = True

    def __init__(self, poison: int | None = None, late: int = 0xA5, chunk: int = 64) -> None:
        super().__init__(poison)
        self.late, self.chunk = late, chunk
        self.flights: list[Late] = []  # that nobody has asked for yet, and those of the last start
        self.started = 0
        self.failing: set[int] = set()
        self.flipping: set[int] = set()
        self.at_chunk: Callable[[str, int], None] = lambda what, number: None

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[Any, ...]:
        for one in (one for block in blocks for one in block):
            adopted = self._to_copy(one.slot, one.buffer, one.nbytes)
            names = tuple(adopted.tensors if one.names is None else one.names)
            for address, _, nbytes in self._pieces(one):
                ctypes.memset(address, self.late, nbytes)
            torch.autograd.graph.increment_version([adopted.tensors[name] for name in names])
        flights = tuple(Late(self._comer(block)) for block in blocks)
        self.flights = [flight for flight in self.flights if not flight.ended] + list(flights)
        return flights

    def land(self) -> None:
        """Bring everything that is on its way."""
        for flight in self.flights:
            flight.order()

    def pause(self, region: Region) -> int:
        self.land()
        return super().pause(region)

    def forget(self, slot: Slot) -> None:
        self.land()
        super().forget(slot)

    def adopt(self, slot: Slot, region: Region, tensors: Mapping[str, Tensor]) -> PartLayout:
        self.land()
        return super().adopt(slot, region, tensors)

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        self.land()
        return super().copy_out(slot, buffer)

    def copy_in(self, slot: Slot, buffer: HostBuffer, nbytes: int) -> int:
        self.land()
        return super().copy_in(slot, buffer, nbytes)

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        self.land()
        return super().fingerprints(slot, names)

    def exchange(self, slot: Slot, out: HostBuffer, into: HostBuffer, nbytes: int) -> int:
        self.land()
        return super().exchange(slot, out, into, nbytes)

    def _exchanged(self, slot: Slot, doing: Literal["exchange", "finish"]) -> Iterator[tuple[int, int, int]]:
        """Chunk by chunk, with a word before each and after the last."""
        number = 0
        for offset, address, nbytes in super()._exchanged(slot, doing):
            for start in range(0, nbytes, self.chunk):
                self.at_chunk(doing, number)
                yield offset + start, address + start, min(self.chunk, nbytes - start)
                number += 1
        self.at_chunk(doing, number)

    def _pieces(self, one: Incoming) -> Iterator[tuple[int, int, int]]:
        """(address, offset in the part, bytes) of each alias group that comes."""
        for group in self._adopted(one.slot).groups:
            if one.names is None or not group.names.isdisjoint(one.names):
                yield group.address, group.offset, max(0, min(group.nbytes, one.nbytes - group.offset))

    def _comer(self, block: Sequence[Incoming]) -> Callable[[], Mapping[Slot, Mapping[str, str]]]:
        number = self.started
        self.started += 1

        def come() -> Mapping[Slot, Mapping[str, str]]:
            if number in self.failing:
                raise RuntimeError(f"arrival {number} fails, as asked")
            found: dict[Slot, dict[str, str]] = {}
            for one in block:
                self._copy(one, flip=number in self.flipping)
                found.setdefault(one.slot, {}).update(ArenaBackend.fingerprints(self, one.slot, one.check))
            return found

        return come

    def _copy(self, one: Incoming, flip: bool) -> None:
        source = pages.address(one.buffer.memory)
        for address, offset, nbytes in self._pieces(one):
            ctypes.memmove(address, source + offset, nbytes)
            if flip and nbytes:
                first = ctypes.c_uint8.from_address(address)
                first.value ^= 1


class TightLateArena(LateArena, TightArena):
    """One on a machine that has ``room`` bytes."""
