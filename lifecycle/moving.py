"""What copies between device and host: the half of ``lifecycle.world`` that moves bytes.

Like all of it, it knows no states and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from lifecycle.actions import Action, Call
from lifecycle.config import LifecycleConfig
from lifecycle.errors import UntrackedChange, VerificationFailed
from lifecycle.fingerprint import part_fingerprint
from lifecycle.hoststore.base import HostBuffer, HostStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.landing import Coming, Landings, Shares, blocks_of, shares_of
from lifecycle.looking import Looking
from lifecycle.manifest import PartLayout
from lifecycle.memory.base import Incoming
from lifecycle.outcome import Measured, Settings, take_measure
from lifecycle.versions import Facts, Part, well_copied
from states.resources import SLOT_REGION, Region, Slot

if TYPE_CHECKING:
    from torch import Tensor

Done = tuple[Any, int]  # what `after` needs to know, and the bytes really moved
_SAMPLE = 8  # verify="sample" looks at every eighth tensor, another eighth each time


@frozen
class Look:
    """A part's tensors on their way to be fingerprinted: what they should come to, and who tells, again if asked, what
    they did."""

    expected: Mapping[str, str]
    read: Callable[[], Mapping[str, str]]

    def changed(self) -> list[str]:
        """Names of those that came to something else. Waits for them."""
        got = self.read()
        return [name for name, value in self.expected.items() if got[name] != value]


class Moving(Looking):
    """The moving half of ``lifecycle.world.World``. ``epoch`` counts overwritings of the device's weights."""

    config: LifecycleConfig
    store: HostStore
    pool: BufferPool
    rest_pool: BufferPool  # for copies of the rest: the same one, unless they shall be on disk

    def __init__(self) -> None:
        self.buffers: dict[int, HostBuffer] = {}  # by part
        self.epoch = 0
        self._event = "attach"
        self._samples: Counter[tuple[Slot, str]] = Counter()  # per event, or some eighths would have no turn at it
        self._optimizer: dict[str, Tensor] = {}
        # per content of the optimizer's slot: what belongs to it besides bytes, and its tensors in the layout's order
        self._skeletons: dict[int, tuple[Any, dict[str, Tensor]]] = {}
        self._landings = Landings()
        self._coming: dict[Slot, Coming] = {}  # of a streamed wake that is about to start
        self._stream_started = False  # by this row: forwards wait for it already, and the row for its first block
        self._shares: dict[Slot, tuple[PartLayout, Sequence[frozenset[str]], Shares]] = {}
        self._verifying: dict[Slot, tuple[str, Look]] = {}  # looks that the copy of the same bytes waits for, with tags
        self._all_out: int | None = None  # the part that an exchange has last copied out to its end

    # measuring

    def _whole(self, slot: Slot, tensors: Mapping[str, str]) -> str:
        return part_fingerprint((t.name, t.dtype, t.shape, tensors[t.name]) for t in self.backend.layout(slot))

    def measure(self, slots: Iterable[Slot]) -> Measured:
        """Fingerprint what the device holds in these slots."""
        tensors = {slot: self.backend.fingerprints(slot) for slot in slots}
        whole = {slot: self._whole(slot, found) for slot, found in tensors.items()}
        return Measured(tensors, whole, {slot: self.nbytes(slot) for slot in tensors})

    def _names_to_verify(self, part: Part) -> Collection[str] | None:
        if self.config.verify == "always":
            return None
        self._samples[part.slot, self._event] += 1
        return list(part.tensors)[self._samples[part.slot, self._event] % _SAMPLE :: _SAMPLE]

    def _look_at(self, part: Part) -> Look:
        names = self._names_to_verify(part)
        expected = {name: part.tensors[name] for name in (part.tensors if names is None else names)}
        return Look(expected, self.backend.start_fingerprints(part.slot, names))

    def _finish_verifying(self, slots: Iterable[Slot], facts: Facts) -> None:
        """Of those that were left to be waited for, if any. Raises UntrackedChange."""
        for slot in slots:
            if slot in self._verifying:
                tag, look = self._verifying.pop(slot)
                if changed := look.changed():
                    raise UntrackedChange(tag, facts.tags[tag], changed)

    def _verify_restored(self, slot: Slot, part: Part) -> None:
        if part.fingerprint is not None and self.config.verify != "never":
            look = self._look_at(part)
            if look.changed():
                raise VerificationFailed(f"restored {slot}", look.expected, look.read())

    def _present_settings(self) -> Settings:
        places = {Slot.REST: self.rest_pool.store.copy}
        return Settings({slot: self.nbytes(slot) for slot in self._slots}, self.store.copy, places)

    # out

    def _buffer_for(self, slot: Slot, part: int) -> tuple[HostBuffer, bool]:
        """A writable buffer for the part's copy, and whether it is a new one."""
        doubted = self.buffers.get(part)
        if doubted is not None:  # readers of it keep it, and see what it should always have been
            self.pool_of(doubted).unseal(doubted)
        pool = self.rest_pool if slot is Slot.REST else self.pool
        return doubted or pool.acquire(self.nbytes(slot)), doubted is None

    def pool_of(self, buffer: HostBuffer) -> BufferPool:
        return self.rest_pool if self.rest_pool.owns(buffer) else self.pool

    def _keep_copy(self, slot: Slot, part: int, check: Callable[[], None] = lambda: None) -> int:
        """Where ``check`` raises there is no copy: the bytes were not the part's."""
        try:
            buffer, new = self._buffer_for(slot, part)
        except BaseException:
            check()  # that they are not the part's is what to hear first
            raise
        try:
            moved = self.backend.copy_out(slot, buffer)
            check()
            self.pool_of(buffer).seal(buffer)
        except BaseException:
            if new:
                self.pool_of(buffer).release(buffer)
            raise
        self.buffers[part] = buffer
        return moved

    def _copy_out(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        assert action.part is not None
        return None, self._keep_copy(action.slot, action.part, partial(self._finish_verifying, [action.slot], facts))

    def _back_up(self, action: Action, facts: Facts, call: Call) -> Done:
        """Copy only if the content differs from the last copy; measuring tells."""
        assert action.slot is not None
        found = self.measure([action.slot])
        part = take_measure(facts, found)[1][action.slot]
        if action.slot is Slot.OPTIMIZER:
            self._keep_skeleton(part)
        if well_copied(facts, part):
            return found, 0
        return found, self._keep_copy(action.slot, part)

    def _make_room(self, action: Action, facts: Facts, call: Call) -> Done:
        """The buffer of an exchange, while nothing has been moved yet."""
        assert action.slot is not None
        assert action.part is not None
        self.buffers[action.part], _ = self._buffer_for(action.slot, action.part)
        return None, 0

    def _exchange(self, action: Action, facts: Facts, call: Call) -> Done:
        """Out and in at once. Whatever stops it, the buffer stays: half of the part may be in it."""
        assert action.slot is not None
        assert action.part is not None
        assert action.into is not None
        self.epoch += 1
        self._all_out = None
        buffer, target = self.buffers[action.part], facts.parts[action.into]
        moved = self.backend.exchange(action.slot, buffer, self.buffers[target.id], target.nbytes)
        self._all_out = action.part
        self.pool.seal(buffer)
        self._verify_restored(action.slot, target)
        return None, moved

    def _put_together(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        assert action.part is not None
        return None, self._finish_half(action.slot, action.part)

    def _finish_half(self, slot: Slot, part: int) -> int:
        """Complete the copy of what is half moved, once: from then on the slot may be overwritten."""
        moved = 0
        if part != self._all_out:  # else what stopped it came after the last chunk
            moved = self.backend.finish_exchange(slot, self.buffers[part])
            self._all_out = part
        self.pool.seal(self.buffers[part])
        return moved

    # in

    def _copy_in(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        assert action.part is not None
        part = facts.parts[action.part]
        if action.slot is Slot.OPTIMIZER:
            self._rebuild_optimizer(part.id)
        if SLOT_REGION[action.slot] is Region.WEIGHTS:
            self.epoch += 1
        if action.late:
            return None, self._start_copy_in(action.slot, part, action.streamed)
        self._landings.forget([action.slot])
        moved = self.backend.copy_in(action.slot, self.buffers[part.id], part.nbytes) if part.nbytes else 0
        self._verify_restored(action.slot, part)
        return None, moved

    def _start_copy_in(self, slot: Slot, part: Part, streamed: bool) -> int:
        """Optimizer state comes behind the weights, on a stream of its own: no forward needs it."""
        if not part.nbytes:
            self._landings.expect(slot, part, ())
            return 0
        check = () if part.fingerprint is None or self.config.verify == "never" else self._names_to_verify(part)
        if streamed:
            self._coming[slot] = part, self.buffers[part.id], check
        else:
            names = tuple(part.tensors if check is None else check)
            one = Incoming(slot, self.buffers[part.id], part.nbytes, check=names)
            arrivals = self.backend.start_copy_in([[one]], aside=slot is Slot.OPTIMIZER)
            self._landings.expect(slot, part, arrivals)
        return part.nbytes

    def _start_stream(self, action: Action, facts: Facts, call: Call) -> Done:
        """Block by block, beside what the caller launches; the row ends when the first block is there."""
        coming, self._coming = self._coming, {}
        arrivals = self.backend.start_copy_in(self._blocks(coming), aside=True)
        for slot, (part, *_) in coming.items():
            self._landings.expect(slot, part, arrivals)
        self._landings.expect_blocks(arrivals)
        self._stream_started = True
        self.adapter.guard_arriving(self._landings.streamed)  # while the bytes of the first one come
        return None, 0

    def await_first(self) -> None:
        """Of a streamed wake that this row has started: the first block, unless the row has waited for all of them.

        Raises VerificationFailed, and what the copy raised.
        """
        if self._stream_started and self._landings.streamed:
            self._landings.first()
        elif self._stream_started:
            self.guard_arriving(False)

    def first_block(self, parts: Iterable[Part]) -> list[Incoming]:
        """What ``_start_stream`` asks for first where these come; what it has checked is not in it."""
        return self._blocks({part.slot: (part, self.buffers[part.id], ()) for part in parts if part.nbytes})[0]

    def _blocks(self, coming: Mapping[Slot, Coming]) -> list[list[Incoming]]:
        wanted = self.adapter.blocks()
        return blocks_of(coming, {slot: self._shares_of(slot, wanted) for slot in coming})

    def _shares_of(self, slot: Slot, wanted: Sequence[frozenset[str]]) -> Shares:
        """Worked out once: neither the layout nor the blocks of a model change often."""
        layout, known = self.backend.layout(slot), self._shares.get(slot)
        if known is None or known[0] is not layout or known[1] is not wanted:
            known = self._shares[slot] = layout, wanted, shares_of(layout, wanted)
        return known[2]

    # what is on its way

    def _arrive(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        self._landings.wait(action.slot)
        return None, 0

    def _land(self, action: Action, facts: Facts, call: Call) -> Done:
        self._landings.land()
        return None, 0

    def coming(self) -> frozenset[Slot]:
        """Slots whose bytes are on their way, or have come and nobody has waited for them."""
        return self._landings.coming

    def order_arrivals(self) -> None:
        """Launches of the caller's stream from here on see weights that are on their way."""
        self._landings.order()

    def block_arrived(self, number: int) -> bool:
        """Wait for a block of a streamed wake; whether its bytes are right, as far as can be told."""
        return self._landings.arrived(number)

    def guard_arriving(self, arriving: bool) -> None:
        if not (arriving and self._stream_started):
            self.adapter.guard_arriving(self._landings.streamed if arriving else None)
        self._stream_started = False

    # optimizer state

    def _adopt_optimizer(self, action: Action, facts: Facts, call: Call) -> Done:
        """Append what is new; where the owner replaced or dropped something, start over."""
        now = {owned.name: owned.tensor for owned in self.adapter.optimizer_tensors()}
        if any(now.get(name) is not own for name, own in self._optimizer.items()):
            self.backend.forget(Slot.OPTIMIZER)
            self._optimizer = {}
        fresh = {name: tensor for name, tensor in now.items() if name not in self._optimizer}
        self.backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, fresh)
        self._optimizer = now
        self._settings = self._present_settings()
        return None, 0

    def _keep_skeleton(self, part: int) -> None:
        layout = self.backend.layout(Slot.OPTIMIZER)
        tensors = {spec.name: self._optimizer[spec.name] for spec in layout}
        self._skeletons[part] = self.adapter.optimizer_skeleton(), tensors

    def _rebuild_optimizer(self, part: int) -> None:
        """An aborted phase may have made, replaced or dropped state: have what this content had, where it was."""
        skeleton, tensors = self._skeletons[part]
        self.adapter.rebuild_optimizer(skeleton)
        if self._optimizer.keys() != tensors.keys() or any(self._optimizer[n] is not t for n, t in tensors.items()):
            self.backend.forget(Slot.OPTIMIZER)
            self._optimizer = {}
            self.backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, tensors)
            self._optimizer = tensors
            self._settings = self._present_settings()
