"""Does what the plan says: the only file that touches memory, host buffers, gradients, groups and hooks.

It knows no states and decides nothing; ``lifecycle.work`` says what to do and ``lifecycle.outcome`` what is true then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lifecycle.adapters.base import Adapter
from lifecycle.config import LifecycleConfig
from lifecycle.errors import NoReadableCopy, UntrackedChange, VerificationFailed
from lifecycle.fingerprint import part_fingerprint
from lifecycle.hoststore.base import HostBuffer, HostStore
from lifecycle.hoststore.pool import BufferPool
from lifecycle.journal import Journal
from lifecycle.looking import Looking
from lifecycle.manifest import Manifest
from lifecycle.memory.base import MemoryBackend
from lifecycle.outcome import Measured, Settings, take_measure
from lifecycle.own import EffectCall, Handler, moved_bytes
from lifecycle.sync.session import SyncSession
from lifecycle.versions import ACTOR, Facts, Lease, Part, lost_tags, version_parts, well_copied
from lifecycle.views import views_over
from lifecycle.work import Action, Call
from states.resources import SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot

if TYPE_CHECKING:
    from torch import Tensor

Done = tuple[Any, int]  # what `after` needs to know, and the bytes really moved
_SAMPLE = 8  # verify="sample" looks at every eighth tensor, another eighth each time


class World(Looking):
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
        self.adapter, self.backend, self.store = adapter, backend, store
        self.config, self.journal, self.handlers = config, journal, handlers
        self.pool = BufferPool(store, on_allocate=self._allocated, protect=config.protect_copies)
        self.buffers: dict[int, HostBuffer] = {}
        self.session: SyncSession | None = None
        self._event = "attach"
        self.attached: frozenset[int] = frozenset()  # the tensors that were taken over, by id; the backend keeps them
        self._slots: tuple[Slot, ...] = ()
        self._samples: Counter[tuple[Slot, str]] = Counter()  # per event, or some eighths would have no turn at it
        self.weight_names: frozenset[str] = frozenset()
        self._optimizer: dict[str, Tensor] = {}  # the state tensors that the backend owns
        # per content of the optimizer's slot: what belongs to it besides bytes, and its tensors in the layout's order
        self._skeletons: dict[int, tuple[Any, dict[str, Tensor]]] = {}
        self._settings = Settings({}, store.copy)
        self.epoch = 0  # counts overwritings of the device's weights
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
        except BaseException:
            self._let_go()
            raise
        self.attached = frozenset(id(tensor) for tensors in by_slot.values() for tensor in tensors.values())
        self.adapter.remember()
        self.weight_names = self.adapter.weight_names()
        self._settings = self._present_settings()
        return [self._first_part(number, slot) for number, slot in enumerate(self._slots, start=1)]

    def _present_settings(self) -> Settings:
        return Settings({slot: self.nbytes(slot) for slot in self._slots}, self.store.copy)

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

    def perform(self, action: Action, facts: Facts, call: Call) -> Done:
        self._event = call.event
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
            "drop_workspaces": lambda *_: (None, self.adapter.drop_workspaces()),
            "discard_grads": lambda *_: (None, self.adapter.discard_grads()),
            "zero_grads": lambda *_: (None, self.adapter.zero_grads()),
            "collect": lambda *_: (None, self.backend.collect()),
            "suspend_groups": _just(self.adapter.suspend_groups),
            "lower_sync_groups": _just(self.adapter.suspend_groups),
            "reload_groups": _just(self.adapter.reload_groups),
            "raise_sync_groups": _just(self.adapter.reload_groups),
            "pause": self._pause,
            "resume": self._resume,
            "copy_in": self._copy_in,
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

    def _whole(self, slot: Slot, tensors: Mapping[str, str]) -> str:
        return part_fingerprint((t.name, t.dtype, t.shape, tensors[t.name]) for t in self.backend.layout(slot))

    def measure(self, slots: Iterable[Slot]) -> Measured:
        """Fingerprint what the device holds in these slots."""
        tensors = {slot: self.backend.fingerprints(slot) for slot in slots}
        whole = {slot: self._whole(slot, found) for slot, found in tensors.items()}
        return Measured(tensors, whole, {slot: self.nbytes(slot) for slot in tensors})

    def _measure_weights(self, action: Action, facts: Facts, call: Call) -> Done:
        return self.measure(slot for slot in VERSION_SLOTS if slot in self._slots), 0

    def _names_to_verify(self, part: Part) -> Collection[str] | None:
        if self.config.verify == "always":
            return None
        self._samples[part.slot, self._event] += 1
        return list(part.tensors)[self._samples[part.slot, self._event] % _SAMPLE :: _SAMPLE]

    def _differences(self, slot: Slot, part: Part) -> tuple[dict[str, str], dict[str, str]]:
        """(expected, got) of the tensors looked at."""
        names = self._names_to_verify(part)
        got = self.backend.fingerprints(slot, names)
        return {name: part.tensors[name] for name in got}, got

    def _verify(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        part = facts.parts[facts.device[action.slot]]  # another one than planned, where all were adopted just before
        expected, got = self._differences(action.slot, part)
        if expected == got:
            return None, 0
        tag = call.shown or ACTOR
        changed = [name for name in expected if expected[name] != got[name]]
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

    def _keep_copy(self, slot: Slot, part: int) -> int:
        doubted = self.buffers.get(part)
        if doubted is not None:  # readers of it keep it, and see what it should always have been
            self.pool.unseal(doubted)
        buffer = doubted or self.pool.acquire(self.nbytes(slot))
        try:
            moved = self.backend.copy_out(slot, buffer)
            self.pool.seal(buffer)
        except BaseException:
            if doubted is None:
                self.pool.release(buffer)
            raise
        self.buffers[part] = buffer
        return moved

    def _copy_out(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        assert action.part is not None
        return None, self._keep_copy(action.slot, action.part)

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

    def _pause(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.region is not None
        if action.region is Region.WEIGHTS:
            self.adapter.guard_released(True)
        return None, self.backend.pause(action.region)

    def _resume(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.region is not None
        return None, self.backend.resume(action.region)

    def _copy_in(self, action: Action, facts: Facts, call: Call) -> Done:
        assert action.slot is not None
        assert action.part is not None
        part = facts.parts[action.part]
        if action.slot is Slot.OPTIMIZER:
            self._rebuild_optimizer(part.id)
        if SLOT_REGION[action.slot] is Region.WEIGHTS:
            self.epoch += 1
        moved = self.backend.copy_in(action.slot, self.buffers[part.id], part.nbytes) if part.nbytes else 0
        if part.fingerprint is not None and self.config.verify != "never":
            expected, got = self._differences(action.slot, part)
            if expected != got:
                raise VerificationFailed(f"restored {action.slot}", expected, got)
        return None, moved

    def _read_back(self, action: Action, facts: Facts, call: Call) -> Done:
        mapped = self.backend.resident()
        slots = [slot for slot in self._slots if SLOT_REGION[slot] in mapped]
        if self.optimizer_appeared() and facts.backups.get(Slot.OPTIMIZER) in facts.copies:
            slots.remove(Slot.OPTIMIZER)  # not all of its state is the backend's: the copy says what it should be
        return self.measure(slots), 0

    def _bring_back(self, action: Action, facts: Facts, call: Call) -> Done:
        """Memory, contents and groups that the actor lacks, where that is possible; else the journal tells why not."""
        moved = 0
        for slot, part in {**facts.version_of(ACTOR).parts, **facts.backups}.items():
            if facts.device.get(slot) == part:
                continue
            try:
                moved += self._bring_slot(slot, facts.parts[part])
            except Exception as error:
                self.journal.add("note", call.event, slot=slot, part=part, note=f"not brought back: {error}")
        try:
            if self.has_groups() and not self.groups_up():
                self.adapter.reload_groups()
        except Exception as error:
            self.journal.add("note", call.event, note=f"groups not brought back: {error}")
        return None, moved

    def _bring_slot(self, slot: Slot, part: Part) -> int:
        region = SLOT_REGION[slot]
        if region not in self.backend.resident():
            free, needed = self.available_bytes(), self.region_bytes(region)
            if free is not None and free < needed + self.config.memory_margin_bytes:
                raise MemoryError(f"{needed} bytes needed and {free} are free")
            self.backend.resume(region)
        if slot is Slot.OPTIMIZER and part.id in self._skeletons:
            self._rebuild_optimizer(part.id)
        if part.id not in self.buffers:
            return 0
        return self.backend.copy_in(slot, self.buffers[part.id], part.nbytes)

    def _free_copies(self, action: Action, facts: Facts, call: Call) -> Done:
        for part in list(self.buffers):
            self.pool.release(self.buffers.pop(part))
        self.pool.close()
        self._let_go()
        return None, 0

    def _let_go(self) -> None:
        """The tensors keep their memory and their values; another actor may take them over."""
        for slot in self._slots:
            self.backend.forget(slot)
        self._optimizer, self._skeletons, self.attached = {}, {}, frozenset()

    # around events

    def free_unreferenced(self, facts: Facts) -> None:
        """Give back the buffers of copies that the facts no longer know."""
        for part in [part for part in self.buffers if part not in facts.copies]:
            self.pool.release(self.buffers.pop(part))
        for part in self._skeletons.keys() - facts.parts.keys():
            del self._skeletons[part]

    def _allocated(self, buffer: HostBuffer) -> None:
        note = f"host buffer {buffer.id} in {self.store.name}"
        self.journal.add("allocate", self._event, nbytes=buffer.nbytes, note=note)

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
