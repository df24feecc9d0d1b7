"""Does what the plan says: with ``lifecycle.moving`` the only file that touches memory, host buffers, gradients, groups
and hooks.

It knows no states and decides nothing; ``lifecycle.work`` says what to do and ``lifecycle.outcome`` what is true then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from lifecycle.actions import Action, Call
from lifecycle.adapters.base import Adapter
from lifecycle.config import LifecycleConfig
from lifecycle.errors import NoReadableCopy, NotBroughtBack, UntrackedChange
from lifecycle.hoststore.base import HostBuffer, HostStore
from lifecycle.hoststore.disk import DiskStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.journal import Journal
from lifecycle.manifest import Manifest
from lifecycle.memory.base import MemoryBackend
from lifecycle.moving import Done, Moving
from lifecycle.outcome import Measured, Settings
from lifecycle.own import EffectCall, Handler, moved_bytes
from lifecycle.sync.session import SyncSession
from lifecycle.versions import ACTOR, Facts, Lease, Part, lost_tags, version_parts
from lifecycle.views import views_over
from states.resources import SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot

if TYPE_CHECKING:
    from torch import Tensor


class World(Moving):
    """One actor's memory backend, adapter, host buffers and, during a sync, engines."""

    def __init__(
        self,
        adapter: Adapter,
        backend: MemoryBackend,
        store: HostStore,
        config: LifecycleConfig,
        journal: Journal,
        handlers: Mapping[str, Handler],
    ) -> None:
        super().__init__()
        self.adapter, self.backend, self.store = adapter, backend, store
        self.config, self.journal, self.handlers = config, journal, handlers
        self.pool = self.rest_pool = self._pool_over(store)
        if config.rest_on_disk is not None:
            self.rest_pool = self._pool_over(DiskStore(config.rest_on_disk))
        self._told: set[str] = set()
        self.session: SyncSession | None = None
        self.attached: frozenset[int] = frozenset()  # the tensors that were taken over, by id; the backend keeps them
        self._slots: tuple[Slot, ...] = ()
        self.weight_names: frozenset[str] = frozenset()
        self._settings = Settings({}, store.copy)
        self._dropped = False
        self._perform: dict[str, Callable[[Action, Facts, Call], Done]] = self._table()

    # attaching

    def attach(self) -> list[Part]:
        """Take over the adapter's tensors and measure them. Returns the first parts, ids from 1."""
        by_slot: dict[Slot, dict[str, Tensor]] = {}
        for owned in (*self.adapter.tensors(), *self.adapter.optimizer_tensors()):
            by_slot.setdefault(owned.slot, {})[owned.name] = owned.tensor
        self._optimizer = dict(by_slot.setdefault(Slot.OPTIMIZER, {}))
        self._slots = tuple(slot for slot in Slot if slot in by_slot)
        try:
            for slot in self._slots:
                self.backend.adopt(slot, SLOT_REGION[slot], by_slot[slot])
            self.backend.complete()
        except BaseException:
            self.let_go()
            raise
        self.attached = frozenset(id(tensor) for tensors in by_slot.values() for tensor in tensors.values())
        self.adapter.remember()
        self.weight_names = self.adapter.weight_names()
        self._settings = self._present_settings()
        return [self._first_part(number, slot) for number, slot in enumerate(self._slots, start=1)]

    def _first_part(self, number: int, slot: Slot) -> Part:
        nbytes = self.nbytes(slot)
        if slot is Slot.OPTIMIZER:
            self._keep_skeleton(number)
            if nbytes:
                return Part(number, slot, nbytes)  # measured when it is first copied out
        tensors = self.backend.fingerprints(slot)
        return Part(number, slot, nbytes, self._whole(slot, tensors), tensors)

    def manifest(self) -> Manifest:
        return Manifest({slot: self.backend.layout(slot) for slot in self._slots})

    # doing

    def foresee(self, todo: Iterable[Action], facts: Facts) -> None:
        coming = []
        with suppress(Exception):  # what stands in the way, the effect itself will raise
            for action in todo:  # weights first: the backend may begin with one region alone
                if action.do == "resume" and action.region is not None:
                    self.backend.begin_resume(action.region)
                elif action.streamed and action.part is not None:
                    coming.append(facts.parts[action.part])
            if coming:
                self.backend.begin_copy_in(self.first_block(coming))

    def catch_up(self, facts: Facts) -> None:
        self._finish_verifying(tuple(self._verifying), facts)
        self.await_first()

    def finish(self, facts: Facts) -> None:
        self.catch_up(facts)
        self._try_to(self.backend.cancel_resume)

    def give_up(self) -> None:
        self._verifying.clear()
        self._try_to(self.backend.cancel_resume)
        if self._stream_started:
            self._try_to(partial(self.guard_arriving, False))

    def _try_to(self, act: Callable[[], None]) -> None:
        """What the row ended with is what the caller must hear."""
        try:
            act()
        except Exception as error:
            self.journal.add("note", self._event, note=f"not given up: {type(error).__name__}: {error}")

    def perform(self, action: Action, facts: Facts, call: Call) -> Done:
        self._event = call.event
        if self._verifying and action.do not in ("verify", "copy_out"):
            self._finish_verifying(tuple(self._verifying), facts)
        if action.own is not None:
            told = EffectCall(call.event, action.do, call.tag, call.shown, facts)
            return None, moved_bytes(action.do, self.handlers[action.do](told))
        do = self._perform.get(action.do)
        if do is not None:
            return do(action, facts, call)
        if action.do.startswith("engine_") or action.do == "connect":
            assert self.session is not None
            return self.session.perform(action, facts, self), 0
        return None, 0  # bookkeeping: `after` does it

    def _table(self) -> dict[str, Callable[[Action, Facts, Call], Done]]:
        return {
            "settle": _just(self.adapter.settle),
            "check": self._check,
            "verify": self._verify,
            "check_copies": self._check_copies,
            "copy_out": self._copy_out,
            "adopt_optimizer": self._adopt_optimizer,
            "back_up": self._back_up,
            "make_room": self._make_room,
            "exchange": self._exchange,
            "put_together": self._put_together,
            "drop_workspaces": self._drop_workspaces,
            "discard_grads": self._discard_grads,
            "zero_grads": lambda *_: (None, self.adapter.zero_grads()),
            "collect_garbage": self._collect_garbage,
            "collect": lambda *_: (None, self.backend.collect()),
            "suspend_groups": _just(self.adapter.suspend_groups),
            "lower_sync_groups": _just(self.adapter.suspend_groups),
            "reload_groups": _just(self.adapter.reload_groups),
            "raise_sync_groups": _just(self.adapter.reload_groups),
            "pause": self._pause,
            "resume": self._resume,
            "copy_in": self._copy_in,
            "start_stream": self._start_stream,
            "arrive": self._arrive,
            "land": self._land,
            "freeze_phase": self._measure_weights,
            "settle_phase": self._measure_weights,
            "freeze_load": self._measure_weights,
            "adopt": self._measure_weights,
            "read_back": self._read_back,
            "bring_back": self._bring_back,
            "remove_hooks": _just(self.adapter.remove),
            "free_copies": self._free_copies,
        }

    def _check(self, action: Action, facts: Facts, call: Call) -> Done:
        self.adapter.check()
        self.backend.check()
        return None, 0

    def _measure_weights(self, action: Action, facts: Facts, call: Call) -> Done:
        return self.measure(slot for slot in VERSION_SLOTS if slot in self._slots), 0

    def _verify(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        part = facts.parts[facts.device[action.slot]]  # another one than planned, where all were adopted just before
        tag, look = call.shown or ACTOR, self._look_at(part)
        # A copy that is made anew can be given back where it turns out to be of something else.
        if action.late and self.config.on_untracked == "refuse" and part.id not in self.buffers:
            self._verifying[action.slot] = tag, look
            return None, 0
        if not (changed := look.changed()):
            return None, 0
        if self.config.on_untracked == "refuse":
            raise UntrackedChange(tag, facts.tags[tag], changed)
        found = self.measure(slot for slot in VERSION_SLOTS if slot in facts.device)
        if losing := self._losing(found, facts, tag):
            advice = (
                f"Adopting them would leave {', '.join(losing)} without any copy: call adopt(), which moves those tags "
                "along, or load their weights again with loading(tag)."
            )
            raise UntrackedChange(tag, facts.tags[tag], changed, advice)
        return found, 0

    def _losing(self, found: Measured, facts: Facts, shown: str) -> list[str]:
        """Other tags with a part that was on the device alone, and no longer is what is there."""
        held = {slot: facts.parts[facts.device[slot]] for slot in found.fingerprints}
        gone = {part.id for slot, part in held.items() if part.fingerprint != found.fingerprints[slot]}
        gone -= facts.copies.keys()
        return [t for t, at in facts.tags.items() if t != shown and not gone.isdisjoint(version_parts(facts, at))]

    def _check_copies(self, action: Action, facts: Facts, call: Call) -> Done:
        for tag in lost_tags(facts):
            version = facts.version_of(tag)
            raise NoReadableCopy(tag, version.id, {facts.parts[p].slot.value: () for p in version.parts.values()})
        if Region.WEIGHTS not in facts.resident:
            for slot, part in facts.backups.items():
                stays = SLOT_REGION[slot] in call.keep and facts.device.get(slot) == part
                if part not in facts.copies and not stays:
                    raise NoReadableCopy(slot.value, 0, {slot.value: ()})
        return None, 0

    def _drop_workspaces(self, action: Action, facts: Facts, call: Call) -> Done:
        self._dropped = True
        given_back = self.adapter.drop_workspaces()
        for name, nbytes in self.adapter.workspaces_dropped():
            self._remark("drop_workspaces", f"{name} gave back {nbytes} bytes", nbytes)
        return None, given_back

    def left_undone(self, effect: str, call: Call) -> None:
        if effect == "drop_workspaces" and self.workspace_bytes():
            kept = "they are kept, as configured" if Region.WORKSPACES in call.keep else self.adapter.why_graphs()
            self._event = call.event
            self._remark(effect, f"workspaces stay: {kept}", self.workspace_bytes())

    def _remark(self, effect: str, note: str, nbytes: int) -> None:
        region = Region.WORKSPACES.value
        self.journal.add("note", self._event, effect=effect, region=region, nbytes=nbytes, note=note)

    def _discard_grads(self, action: Action, facts: Facts, call: Call) -> Done:
        self._dropped = True
        return None, self.adapter.discard_grads()

    def _collect_garbage(self, action: Action, facts: Facts, call: Call) -> Done:
        gc.collect()
        self._dropped = False
        return None, 0

    def _pause(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.region is not None
        if action.region is Region.WEIGHTS:
            self.adapter.guard_released(True)
        self._landings.forget([slot for slot in self._slots if SLOT_REGION[slot] is action.region])
        return None, self.backend.pause(action.region)

    def _resume(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.region is not None
        return None, self.backend.resume(action.region)

    def _read_back(self, action: Action, facts: Facts, call: Call) -> Done:
        mapped = self.backend.resident()
        slots = [slot for slot in self._slots if SLOT_REGION[slot] in mapped]
        if self.optimizer_appeared() and facts.backups.get(Slot.OPTIMIZER) in facts.copies:
            slots.remove(Slot.OPTIMIZER)  # not all of its state is the backend's: the copy says what it should be
        return self.measure(slots), 0

    def _bring_back(self, action: Action, facts: Facts, call: Call) -> Done:
        """Memory, contents and groups that the actor lacks, where that is possible; else the journal tells why not.

        Raises NotBroughtBack where that are weights, unless the caller gives them up.
        """
        moved, lost = 0, dict[Slot, str]()
        for slot, part in {**facts.version_of(ACTOR).parts, **facts.backups}.items():
            if facts.device.get(slot) == part:
                continue
            try:
                moved += self._bring_slot(slot, facts.parts[part], facts.halves.get(slot))
            except Exception as error:
                lost[slot] = str(error)
                self.journal.add("note", call.event, slot=slot, part=part, note=f"not brought back: {error}")
        try:
            if self.has_groups() and not self.groups_up():
                self.adapter.reload_groups()
        except Exception as error:
            self.journal.add("note", call.event, note=f"groups not brought back: {error}")
        weights = {str(slot): why for slot, why in lost.items() if slot in VERSION_SLOTS}
        if weights and not call.force:
            raise NotBroughtBack(weights)
        return None, moved

    def _bring_slot(self, slot: Slot, part: Part, half: int | None) -> int:
        region = SLOT_REGION[slot]
        if region not in self.backend.resident():
            free, needed = self.available_bytes(), self.region_bytes(region)
            if free is not None and free < needed + self.config.memory_margin_bytes:
                raise MemoryError(f"{needed} bytes needed and {free} are free")
            self.backend.resume(region)
        if slot is Slot.OPTIMIZER and part.id in self._skeletons:
            self._rebuild_optimizer(part.id)
        if part.id not in self.buffers:
            if part.nbytes and self.attached:  # what was let go is the caller's already
                raise LookupError("there is no copy of it any more")
            return 0
        if half is not None:
            self._finish_half(slot, half)
        return self.backend.copy_in(slot, self.buffers[part.id], part.nbytes)

    def _free_copies(self, action: Action, facts: Facts, call: Call) -> Done:
        for part in list(self.buffers):
            self._give_back(part)
        for pool in {id(pool): pool for pool in (self.pool, self.rest_pool)}.values():
            pool.close()
        self.let_go()
        return None, 0

    def let_go(self) -> None:
        """The tensors keep their memory and their values; another actor may take them over."""
        for slot in self._slots:
            self.backend.forget(slot)
        self._optimizer, self._skeletons, self.attached = {}, {}, frozenset()

    # around events

    def free_unreferenced(self, facts: Facts) -> None:
        """Give back the buffers of copies that the facts no longer know."""
        kept = facts.copies.keys() | facts.halves.values()
        for part in [part for part in self.buffers if part not in kept]:
            self._give_back(part)
        for part in self._skeletons.keys() - facts.parts.keys():
            del self._skeletons[part]

    def _give_back(self, part: int) -> None:
        buffer = self.buffers.pop(part)
        self.pool_of(buffer).release(buffer)

    def _pool_over(self, store: HostStore) -> BufferPool:
        def allocated(buffer: HostBuffer) -> None:
            note = f"host buffer {buffer.id} in {store.name}"
            self.journal.add("allocate", self._event, nbytes=buffer.nbytes, note=note)
            for note in store.notes():
                if note not in self._told:
                    self._told.add(note)
                    self.journal.add("note", self._event, note=note)

        return BufferPool(store, on_allocate=allocated, protect=self.config.protect_copies)

    # reading

    def read(self, facts: Facts, lease: Lease) -> dict[str, Tensor]:
        """Tensors by name, straight from the leased sources. Read-only by contract."""
        found: dict[str, Tensor] = {}
        for part, place in lease.sources.items():
            slot = facts.parts[part].slot
            layout = self.backend.layout(slot)
            found |= self.backend.views(slot) if place is Copy.DEVICE else views_over(self.buffers[part], layout)
        return {name: tensor for name, tensor in found.items() if name in self.weight_names}


def _just(act: Callable[[], None]) -> Callable[[Action, Facts, Call], Done]:
    def perform(action: Action, facts: Facts, call: Call) -> Done:
        act()
        return None, 0

    return perform
