"""What backends over torch's own tensors have in common: tensors stay where they are, or where a subclass puts them.

Theory of operation. ``adopt`` lays the part out as the device has it, so that neighbours there move as one *run*
(``lifecycle.memory.moves``). Everything a copy needs is made once per slot and kept while addresses stay. Copies go
straight between the tensors' memory and the host buffer, ordered by events (``lifecycle.memory.streams``); the device
as a whole is waited for in one place only: before memory is given back, because the driver unmaps it under running
kernels without a word, and they then end the process.

A subclass says how memory is given back and taken: ``_place``, ``_release``, ``_take_back``; and ``complete``,
``begin_resume``, ``begin_copy_in``, ``cancel_resume``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor

from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.manifest import PartLayout
from lifecycle.memory import aliases, driver, moves, pages, streams
from lifecycle.memory.base import Holder, Incoming
from lifecycle.memory.beside import behind
from lifecycle.memory.holders import holders
from lifecycle.memory.holding import Holding, refuse_owned
from lifecycle.memory.launches import Ahead, Launch, Marks, bump, enqueue, fly
from states.resources import SLOT_REGION, Region, Slot

# Of all backends of this process: two actors must not move the same bytes.
_owned: WeakSet[Holding] = WeakSet()


class DeviceBackend(ABC):
    """Owns the device bytes of one actor's tensors. Implements ``MemoryBackend``; not thread-safe, like every backend.

    ``device`` is the type of device, all of whose devices may be used at once. With ``poison`` (0 to 255) memory that
    ``resume`` took back is filled with that byte, so that bytes nobody restored can not pass for luck. For tests.
    """

    name: str
    keeps_addresses: bool

    def __init__(self, device: str = "cuda", poison: int | None = None) -> None:
        self.device = device
        self.stream_ordered = self.overlaps = device == "cuda"
        self._poison = poison
        self._slots: dict[Slot, Holding] = {}
        self._paused: set[Region] = set()
        self._swaps: dict[Slot, moves.Swap] = {}
        self._streams = streams.OwnStreams()
        self._flying: list[streams.Flight] = []
        self._ahead: Ahead | None = None  # copies that began before they were asked for

    # for subclasses

    @abstractmethod
    def _place(self, region: Region, groups: Sequence[aliases.AliasGroup]) -> None:
        """Bring the groups' bytes into memory that pausing this region releases, rebinding those not there yet.

        All of them or none. Called in no_grad and outside inference mode. Raises ManifestError naming groups that can
        not be brought there, MemoryError where there is no room for the copy.
        """

    @abstractmethod
    def _release(self, region: Region) -> None:
        """Give the region's memory back. Nothing runs on its devices any more."""

    @abstractmethod
    def _take_back(self, region: Region) -> None:
        """Map the region again. MemoryError when there is no room: nothing of it is mapped then."""

    def _needed(self, region: Region) -> Mapping[int, int]:
        """Bytes that taking the region back needs, by index of the device."""
        needed: Counter[int] = Counter()
        for one in self._placed_in(region):
            needed[one.memory.device.index or 0] += one.memory.numel()
        return needed

    def _free_bytes(self, index: int) -> int:
        """Bytes that could be mapped on this device now."""
        if self.device != "cuda":
            return pages.available()
        return int(torch.cuda.mem_get_info(index)[0])

    # MemoryBackend

    def adopt(self, slot: Slot, region: Region, tensors: Mapping[str, Tensor]) -> PartLayout:
        """Take over the tensors, which keep their values, and return the slot's whole layout.

        Raises ManifestError for tensors that are not plain, strided, normal ones of this kind of device, whose storage
        a tensor outside ``tensors`` shares, that another slot or actor owns already, or that the backend could not
        release; nothing was moved then.
        """
        assert region not in self._paused, f"adopt into paused region {region}"
        before = self._holding(slot, region)
        assert before.region == region, f"slot {slot} belongs to region {before.region}, not {region}"
        assert not before.tensors.keys() & tensors.keys(), f"slot {slot} has these names already"
        if not tensors:
            return before.layout
        # Tensors made in inference mode, or whose making autograd saw, could not stand in for parameters.
        with torch.inference_mode(False), torch.no_grad():
            aliases.refuse_unmovable(tensors, self.device)
            groups = aliases.alias_groups(tensors)
            refuse_owned(groups, _owned)
            aliases.refuse_outsiders(groups)
            self._place(region, groups)
            after = before.extended(aliases.alias_groups(tensors), tensors)
        self._slots[slot] = after
        _owned.add(after)
        return after.layout

    def forget(self, slot: Slot) -> None:
        self._order_flights()  # whoever gets the memory next on the caller's stream comes behind them
        self._slots.pop(slot, None)
        self._swaps.pop(slot, None)

    def layout(self, slot: Slot) -> PartLayout:
        return self._holding(slot).layout

    def check(self) -> None:
        for slot in self._slots:
            self._slots[slot].refuse_moved()

    @abstractmethod
    def complete(self) -> None: ...

    def pause(self, region: Region) -> int:
        """Give the region's memory back. Raises ManifestError, before any is, when tensors were rebound."""
        assert region not in self._paused, f"pause of paused region {region}"
        for slot in self._slots_of(region):
            self._slots[slot].refuse_moved()
        self._end_ahead()
        streams.settle(self._devices(region))
        self._flying = [flight for flight in self._flying if not flight.ended()]
        self._release(region)
        self._paused.add(region)
        self._addresses_changed(region)
        return self._nbytes(region)

    def resume(self, region: Region) -> int:
        """Take the region's memory back. MemoryError when there is no room: still paused."""
        assert region in self._paused, f"resume of resident region {region}"
        with streams.on_default(self._devices(region)):  # where memory is taken by default, and waited for by copies
            self._take_back(region)
            self._paused.remove(region)
            self._addresses_changed(region)
            if not self._copied_ahead(region):
                self._fill_with_poison(region)
        return self._nbytes(region)

    @abstractmethod
    def begin_resume(self, region: Region) -> None: ...

    @abstractmethod
    def begin_copy_in(self, block: Sequence[Incoming]) -> None: ...

    @abstractmethod
    def cancel_resume(self) -> None: ...

    def resident(self) -> frozenset[Region]:
        return frozenset(Region) - self._paused

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        """As ``MemoryBackend`` says. Raises ManifestError when tensors were rebound, RuntimeError from the device."""
        holding = self._to_copy(slot)
        assert buffer.nbytes >= holding.layout.nbytes, f"buffer of {buffer.nbytes} bytes for {holding.layout.nbytes}"
        with self._complete(holding):
            moves.copy_out(holding.runs(), tensor_over(buffer))
        return holding.layout.nbytes

    def copy_in(self, slot: Slot, buffer: HostBuffer, nbytes: int) -> int:
        """As ``MemoryBackend`` says. Raises ManifestError when tensors were rebound, RuntimeError from the device."""
        holding = self._to_copy(slot)
        _refuse_beyond(holding, buffer, nbytes)
        bump(holding.tensors.values())
        with self._complete(holding):
            moves.copy_in(holding.runs(), tensor_over(buffer), nbytes)
        return nbytes

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[streams.Flight, ...]:
        """As ``MemoryBackend`` says. Raises as ``copy_in`` does; what had been started has ended then."""
        pieces = list(chain.from_iterable(blocks))
        holdings = {slot: self._mapped(slot) for slot in dict.fromkeys(one.slot for one in pieces)}
        for one in pieces:
            _refuse_beyond(holdings[one.slot], one.buffer, one.nbytes)
        devices = tuple(dict.fromkeys(device for holding in holdings.values() for device in holding.devices))
        own = [self._streams.get(device, "aside") if aside else None for device in devices]
        # Fingerprints need the processors, which a forward may have: those of blocks are started by who waits for them.
        checking = [self._streams.get(device, "check") if aside else None for device in devices]
        for stream in own:
            streams.follow(stream)
        with ExitStack() as stack:
            for stream in own:
                stack.enter_context(streams.on(stream))
            if not aside:
                streams.follow_default(devices)
            stack.enter_context(streams.ended_on_error(devices))
            flights: list[streams.Flight] = []
            # One after the other: the link is at work from the first block on.
            for block in blocks:
                flights.append(self._fly([self._launch(one) for one in block], devices, checking))
                if len(flights) == 1:
                    for holding in holdings.values():
                        holding.refuse_moved()  # what is copied to is ours in any case
                    if any(checking) and len(blocks) > 1:
                        flights[0].start_check()  # of the first of several nobody has a forward yet
        self._flying = [flight for flight in self._flying if not flight.ended()] + flights
        return tuple(flights)

    def exchange(self, slot: Slot, out: HostBuffer, into: HostBuffer, nbytes: int) -> int:
        """As ``MemoryBackend`` says. Raises as ``copy_in`` does; what had been started has ended then."""
        holding = self._to_copy(slot)
        _refuse_beyond(holding, into, nbytes)
        assert out.nbytes >= holding.layout.nbytes, f"buffer of {out.nbytes} bytes for {holding.layout.nbytes}"
        assert out is not into, "an exchange needs two buffers"
        lanes = streams.Lanes(holding.devices, self._streams)
        self._order_flights()
        bump(holding.tensors.values())
        self._swaps[slot] = moves.Swap(holding.chunks(), out, into, nbytes, lanes)
        self._swaps[slot].run()
        del self._swaps[slot]
        return holding.layout.nbytes

    def finish_exchange(self, slot: Slot, out: HostBuffer) -> int:
        """As ``MemoryBackend`` says. Raises as ``copy_out`` does."""
        self._to_copy(slot)
        if slot not in self._swaps:
            return self.copy_out(slot, out)
        assert self._swaps[slot].out is out, f"the exchange of slot {slot} goes to another buffer"
        moved = self._swaps[slot].finish()
        del self._swaps[slot]
        return moved

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        self._order_flights()
        return self._holding(slot).prepared(names).start().read()

    def start_fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> Callable[[], Mapping[str, str]]:
        self._order_flights()
        holding = self._holding(slot)
        with ExitStack() as stack:
            for device in holding.devices:
                stream = self._streams.get(device, "check")
                streams.follow(stream)
                stack.enter_context(streams.on(stream))
            return holding.prepared(names).start().read

    def views(self, slot: Slot) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._holding(slot).tensors.items()}

    def collect(self) -> int:
        """Of all devices of the process, and torch's cache of pinned host memory, which is not counted."""
        if self.device != "cuda":
            return pages.trim()
        before = driver.reserved()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # torch 2.5 and later
            torch._C._host_emptyCache()
        return max(0, before - driver.reserved())

    def available(self) -> int | None:
        """Of the paused regions' bytes, or of all regions' where none is paused: as many as fit, in equal shares.

        Where a region lies on several devices, the fullest of them decides.
        """
        regions = {holding.region for holding in self._slots.values()}
        regions = regions & self._paused or regions
        needed: Counter[int] = Counter()
        for region in regions:
            needed.update(self._needed(region))
        total = sum(map(self._nbytes, regions))
        rooms = [self._free_bytes(index) * total // share for index, share in needed.items() if share]
        return min(rooms) if rooms else self._free_bytes(torch.cuda.current_device() if self.device == "cuda" else 0)

    def held(self) -> dict[Region, int]:
        regions = {holding.region for holding in self._slots.values()}
        return {region: 0 if region in self._paused else self._nbytes(region) for region in regions}

    def holders(self) -> tuple[Holder, ...]:
        mine = [one.memory.untyped_storage() for holding in self._slots.values() for one in holding.placed]
        unmapped: Counter[int] = Counter()
        if self.keeps_addresses:  # torch's allocator goes on counting what is paused
            for region in self._paused:
                unmapped.update(self._needed(region))
        return holders(self.device, [(one.data_ptr(), one.nbytes()) for one in mine], unmapped=unmapped)

    # what is known

    def _holding(self, slot: Slot, region: Region | None = None) -> Holding:
        region = SLOT_REGION[slot] if region is None else region
        return self._slots.get(slot) or Holding(region, PartLayout(slot, region, 0))

    def _slots_of(self, region: Region) -> list[Slot]:
        return [slot for slot, holding in self._slots.items() if holding.region == region]

    def _placed_in(self, region: Region) -> Iterator[moves.Placed]:
        return chain.from_iterable(self._slots[slot].placed for slot in self._slots_of(region))

    def _devices(self, region: Region) -> tuple[torch.device, ...]:
        return tuple(dict.fromkeys(one.memory.device for one in self._placed_in(region)))

    def _nbytes(self, region: Region) -> int:
        return sum(self._slots[slot].layout.nbytes for slot in self._slots_of(region))

    def _addresses_changed(self, region: Region) -> None:
        if not self.keeps_addresses:
            for slot in self._slots_of(region):
                self._slots[slot].addresses_changed()

    # copying

    def _to_copy(self, slot: Slot) -> Holding:
        """Refuse a copy that could not be right."""
        holding = self._mapped(slot)
        holding.refuse_moved()
        return holding

    def _mapped(self, slot: Slot) -> Holding:
        holding = self._holding(slot)
        assert holding.region not in self._paused, f"copy to or from paused slot {slot}"
        return holding

    def _complete(self, holding: Holding) -> AbstractContextManager[None]:
        self._order_flights()
        return streams.complete(holding.devices)

    def _order_flights(self) -> None:
        """What is launched from here on comes behind the copies that are still under way."""
        for flight in self._flying:
            flight.order()

    def _launch(self, one: Incoming) -> Launch:
        holding = self._holding(one.slot)
        names = holding.tensors if one.names is None else one.names
        touched = tuple(holding.tensors[name] for name in names)
        prepared = holding.prepared(one.check) if one.check else None
        return Launch(one, holding.runs(one.names), tensor_over(one.buffer), touched, prepared)

    def _fly(
        self, block: Sequence[Launch], devices: Sequence[torch.device], checking: Sequence[torch.cuda.Stream | None]
    ) -> streams.Flight:
        """The block's copies on the current streams, unless they are on their way already."""
        for launch in block:
            bump(launch.touched)
        arrived = None if self._ahead is None else self._ahead.of(block)
        self._ahead = None
        return fly(block, enqueue(block, devices) if arrived is None else arrived, checking)

    def _copy_behind(self, mapped: Future[None], region: Region, block: Sequence[Incoming]) -> Ahead:
        """Have the thread that maps the region enqueue the block's copies when it has."""
        launches = tuple(map(self._launch, block))
        devices = self._devices(region)
        own = [self._streams.get(device, "aside") for device in devices]
        for stream in own:
            streams.follow(stream)

        def copy() -> Marks:
            mapped.result()
            with ExitStack() as stack:
                for stream in own:
                    stack.enter_context(streams.on(stream))
                stack.enter_context(streams.ended_on_error(devices))
                self._fill_with_poison(region)
                return enqueue(launches, devices)

        return Ahead(region, launches, behind(copy))

    def _end_ahead(self) -> None:
        """Return when nothing of it runs any more, in the thread or on the device; interrupted, it stays."""
        if self._ahead is not None:
            self._ahead.told.exception()
            streams.settle(self._devices(self._ahead.region))
            self._ahead = None

    def _copied_ahead(self, region: Region) -> bool:
        """Whether there are such copies; whatever touches the same memory from here on comes behind them."""
        flight = self._ahead.flight() if self._ahead is not None and self._ahead.region is region else None
        if flight is not None:
            self._flying.append(flight)
        return flight is not None

    def _fill_with_poison(self, region: Region) -> None:
        if self._poison is not None:
            for one in self._placed_in(region):
                one.memory.fill_(self._poison)


def _refuse_beyond(holding: Holding, buffer: HostBuffer, nbytes: int) -> None:
    assert nbytes <= min(buffer.nbytes, holding.layout.nbytes), f"{nbytes} bytes are more than there are"
