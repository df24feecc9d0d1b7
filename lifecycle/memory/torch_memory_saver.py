"""The memory saver's backend on CUDA: memory is unmapped and mapped again at the same addresses, so graphs survive.

Theory of operation. Each region of an actor is one pool of the saver, ``pool_name``. Tensors that were allocated in
``lifecycle.region`` lie there already and are not touched; others are moved in by ``adopt``. The saver keeps no copy of
its own: contents are the controller's business. A pause releases whole segments, whatever lies in them, so
``complete`` refuses memory in them that no slot owns.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from weakref import WeakValueDictionary

import torch

from lifecycle.errors import ManifestError, TransitionRefused
from lifecycle.memory import aliases, streams
from lifecycle.memory.aliases import AliasGroup
from lifecycle.memory.base import Holder, Incoming
from lifecycle.memory.device import DeviceBackend
from lifecycle.memory.driver import cached
from lifecycle.memory.holders import holders
from lifecycle.memory.moves import BLOCK
from lifecycle.memory.saver import GRANULE, PoolState, Span, ledger
from states.resources import Region

BATCH = 1 << 30  # bytes moved into a pool at a time: this much is there twice for a moment
_SAMPLES = 4  # segments of a pool that are looked at in each event: the saver pauses and resumes all of it
_SEGMENT = 20 << 20  # bytes of the segment that torch takes for anything from 1 to 10 MiB
_OWNED = (Region.WEIGHTS, Region.OPTIMIZER, Region.REST)  # what lies in their pools must belong to a slot

_owners: WeakValueDictionary[str, TorchMemorySaverBackend] = WeakValueDictionary()


def pool_name(actor: str, region: Region) -> str:
    """The saver's tag for a region of the actor of this name."""
    return f"{actor}.{region}"


class TorchMemorySaverBackend(DeviceBackend):
    """Owns the CUDA memory of the actor called ``actor``, in pools of the memory saver. Implements ``MemoryBackend``.

    ``moved_bytes`` counts what ``adopt`` had to move into pools: 0 where all was allocated in ``lifecycle.region``.
    Raises MissingExtra, SaverUnusable or TransitionRefused (``saver.ledger``) where the saver can not be used here.
    """

    name = "torch_memory_saver"
    keeps_addresses = True

    def __init__(self, actor: str = "actor", poison: int | None = None) -> None:
        super().__init__("cuda", poison)
        self.actor = actor
        self.moved_bytes = 0
        self._ledger = ledger()
        self._begun: dict[Region, Future[None]] = {}  # mapped ahead: at most one, which nobody has resumed yet

    @property
    def pool_bytes(self) -> dict[Region, int]:
        """Bytes of each pool's segments: what a pause gives back and a resume needs, above the tensors' own bytes."""
        return {region: sum(span.nbytes for span in self._segments(region)) for region in self._pooled()}

    def complete(self) -> None:
        """Raise ManifestError naming memory in the actor's pools that no slot owns: a pause would lose its content."""
        if self._strangers():
            gc.collect()  # what is only in a reference cycle is no reason to refuse
            if strangers := self._strangers():
                raise ManifestError(
                    "memory in pools that a sleep releases belongs to nothing that was attached",
                    strangers,
                    "Allocate it outside lifecycle.region, or name it in extra=.",
                )

    def check(self) -> None:
        """Also raises TransitionRefused where a pool was paused behind the ledger's back: its tensors can't be read."""
        super().check()
        pools = [pool_name(self.actor, region) for region in self._pooled() if region not in self._paused]
        for pool, state in self._ledger.states(pools, _SAMPLES).items() if pools else ():
            if state is not PoolState.ACTIVE:
                raise TransitionRefused(
                    f"use of pool {pool!r}",
                    str(state),
                    ("recover", "close"),
                    "the saver's library was called without the ledger, and the memory's content is lost",
                    "recover() maps it again and restores it from surviving copies.",
                )

    def resident(self) -> frozenset[Region]:
        """As the ledger has it: a pool that ``check`` found paused by somebody else counts as paused."""
        for region in self._pooled():
            if region in self._begun:
                continue
            state = self._ledger.recorded(pool_name(self.actor, region))
            (self._paused.discard if state is PoolState.ACTIVE else self._paused.add)(region)
        return super().resident()

    def holders(self) -> tuple[Holder, ...]:
        """As ``MemoryBackend`` says; what lies in a paused pool, whoever's, holds nothing."""
        paused = [pool for pool in self._ledger.pools() if self._ledger.recorded(pool) is PoolState.PAUSED]
        spans = [span for pool in paused for span in self._ledger.segments(pool)]
        storages = [one.memory.untyped_storage() for region in Region for one in self._placed_in(region)]
        owned = [(span.address, span.nbytes) for span in spans] + [(one.data_ptr(), one.nbytes()) for one in storages]
        unmapped: Counter[int] = Counter()
        for span in spans:
            unmapped[span.device] += span.nbytes
        return holders(self.device, owned, unmapped=unmapped)

    def _place(self, region: Region, groups: Sequence[AliasGroup]) -> None:
        """See ``DeviceBackend``. Raises NoRoom where there is none for a batch beside what it replaces; tensors that
        were moved by then are in the pool, with their values."""
        pool = pool_name(self.actor, region)
        self._claim(region, pool)
        where = {other: _Ranges(self._ledger.segments(other)) for other in self._ledger.pools()}
        placed = {index: name for index, group in enumerate(groups) for name in where if group.address in where[name]}
        wrong = [f"{_names(groups[index])} in pool {name!r}" for index, name in placed.items() if name != pool]
        if wrong:
            raise ManifestError(
                f"tensors of region {region} of actor {self.actor!r} lie in other pools of the memory saver",
                wrong,
                f"Allocate them inside lifecycle.region({region.value!r}, actor={self.actor!r}), or outside any.",
            )
        self._move([group for index, group in enumerate(groups) if group.nbytes and index not in placed], pool)

    def _release(self, region: Region) -> None:
        if region in self._pooled():
            # Also for what is in the pool and in no slot, such as gradients. An error that the device already has is
            # raised here; met by the saver it would end the process.
            streams.settle(torch.device(self.device, index) for index in self._needed(region))
            self._ledger.pause(pool_name(self.actor, region))

    def _take_back(self, region: Region) -> None:
        if region in self._begun:
            self._begun[region].exception()  # interrupted while it waits, it stays begun
            self._begun.pop(region).result()
        elif region in self._pooled():
            self._ledger.resume(pool_name(self.actor, region))

    def begin_resume(self, region: Region) -> None:
        """The saver maps one region ahead, in a thread."""
        if not self._begun and region in self._paused and region in self._pooled():
            with suppress(Exception):  # whatever it is, the resume will raise it, or do without a thread
                self._begun[region] = self._ledger.begin_resume(pool_name(self.actor, region))

    def begin_copy_in(self, block: Sequence[Incoming]) -> None:
        """The thread that maps goes on with the copies, if the block lies in what it maps."""
        for region, mapped in self._begun.items():
            if self._ahead is None and {self._holding(one.slot).region for one in block} == {region}:
                with suppress(Exception):  # whatever it is, the copy will raise it, or do without a thread
                    self._ahead = self._copy_behind(mapped, region, block)

    def cancel_resume(self) -> None:
        """Raises TransitionRefused where somebody allocates in the pool: it stays mapped, and the next resume's."""
        self._end_ahead()
        for region, mapped in tuple(self._begun.items()):
            if mapped.exception() is None:
                self._ledger.pause(pool_name(self.actor, region))
            del self._begun[region]

    def _needed(self, region: Region) -> Mapping[int, int]:
        needed: Counter[int] = Counter()
        for span in self._segments(region):
            needed[span.device] += span.nbytes
        return needed

    def _free_bytes(self, index: int) -> int:
        """With what torch only keeps, which the ledger has it give back before a resume."""
        return super()._free_bytes(index) + cached(index)

    def _claim(self, region: Region, pool: str) -> None:
        """Raise ManifestError where another living actor has tensors in this pool: one's sleep would be the other's.

        Raises TransitionRefused where the pool is paused.
        """
        owner = _owners.get(pool)
        if owner is not None and owner is not self and any(owner._slots_of(region)):
            raise ManifestError(
                "two actors would share a pool of the memory saver",
                [pool],
                "Give them names: ActorLifecycle(..., name='ref'), and lifecycle.region(..., actor='ref').",
            )
        state = self._ledger.claim(pool)
        if state not in (None, PoolState.ACTIVE):
            raise TransitionRefused(
                f"attaching to pool {pool!r}",
                str(state),
                ("resume",),
                "it was left paused, and the content of what lies in it is lost",
                f"lifecycle.memory.saver.ledger().resume({pool!r}) maps it again; then load the values anew.",
            )
        _owners[pool] = self

    def _move(self, groups: Sequence[AliasGroup], pool: str) -> None:
        for device in dict.fromkeys(group.storage.device for group in groups):
            with torch.cuda.device(device):
                torch.cuda.synchronize()  # whatever stream still writes to what moves
                for batch in _batches([group for group in groups if group.storage.device == device]):
                    self._move_batch(batch, pool, device)

    def _move_batch(self, groups: Sequence[AliasGroup], pool: str, device: torch.device) -> None:
        reserve = sum(-(-group.nbytes // BLOCK) * BLOCK for group in groups)
        with self._ledger.allocating(pool, _room(groups), reserve if len(groups) > 1 else 0):
            memory = [torch.empty(group.nbytes, dtype=torch.uint8, device=device) for group in groups]
        for group, there in zip(groups, memory, strict=True):
            there.copy_(aliases.extent(group))
        torch.cuda.current_stream(device).synchronize()  # the old memory is free from here on, for any stream
        aliases.rebind(groups, [there.untyped_storage() for there in memory])
        torch.cuda.empty_cache()
        self.moved_bytes += sum(group.nbytes for group in groups)

    def _pooled(self) -> list[Region]:
        pools = self._ledger.pools()
        return [region for region in Region if pool_name(self.actor, region) in pools]

    def _segments(self, region: Region) -> tuple[Span, ...]:
        return self._ledger.segments(pool_name(self.actor, region))

    def _strangers(self) -> list[str]:
        return [found for region in self._pooled() if region in _OWNED for found in self._strangers_in(region)]

    def _strangers_in(self, region: Region) -> Iterator[str]:
        blocks = self._ledger.live_blocks(pool_name(self.actor, region))
        owned = _Ranges(blocks).holding(one.address for one in self._placed_in(region))
        for block in blocks:
            if block.address not in owned:
                yield f"{block.nbytes} bytes at {block.address:#x} on cuda:{block.device} in region {region}"


class _Ranges:
    """Ranges of memory that do not overlap, to look addresses up in."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.address)
        self._starts = [span.address for span in self._spans]

    def __contains__(self, address: int) -> bool:
        return self._start(address) is not None

    def holding(self, addresses: Iterable[int]) -> set[int | None]:
        """Where the ranges start that hold one of these addresses."""
        return {self._start(address) for address in addresses}

    def _start(self, address: int) -> int | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._spans[index].nbytes:
            return None
        return self._starts[index]


def _batches(groups: Sequence[AliasGroup]) -> Iterator[list[AliasGroup]]:
    """The groups in order, up to ``BATCH`` bytes together, or one that is larger."""
    batch: list[AliasGroup] = []
    nbytes = 0
    for group in groups:
        if batch and nbytes + group.nbytes > BATCH:
            yield batch
            batch, nbytes = [], 0
        batch.append(group)
        nbytes += group.nbytes
    if batch:
        yield batch


def _room(groups: Sequence[AliasGroup]) -> int:
    """Bytes that torch may take for these: large ones cut from one segment, small ones filling shared segments."""
    large = sum(-(-group.nbytes // GRANULE) * GRANULE for group in groups)
    return large if len(groups) == 1 and groups[0].nbytes >= _SEGMENT else large + _SEGMENT + GRANULE


def _names(group: AliasGroup) -> str:
    return ", ".join(group.tensors)
