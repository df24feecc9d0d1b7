"""A world of tokens instead of tensors: what ``lifecycle.world`` does, on ``things``.

``FakeWorld`` performs actions on a copy of them, as the real one would, and can be made to fail. Whatever it sees that
must not be (bytes that are not what the facts say, memory paused twice) it notes in ``complaints``, since an exception
would only be unwound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import define, evolve, field, frozen
from things import BYTES, EngineThing, Things, fresh

from lifecycle.actions import Action, Call
from lifecycle.errors import NoReadableCopy
from lifecycle.executor import Executor
from lifecycle.outcome import Measured, Settings, take_measure
from lifecycle.sync.session import SyncSession
from lifecycle.versions import ACTOR, Facts, Lease, lost_tags, well_copied
from states.resources import SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot


@frozen
class Segment:
    """A host buffer, as a session sees it."""

    id: int


class Injected(Exception):
    """A failure that a test asked for."""


def _without(halves: Mapping[Slot, str], slots: Collection[Slot]) -> dict[Slot, str]:
    return {slot: token for slot, token in halves.items() if slot not in slots}


@define
class Journal:
    """Keeps nothing. Fails after an action, where the next one of the same effect shall not even begin."""

    world: FakeWorld

    def add(self, kind: str, *told: Any, **fields: Any) -> None:
        number = len(self.world.done)
        if kind == "effect" and self.world.plan.get(number) == "between":
            self.world.done.append(Action("nothing"))
            raise Injected("journal")


class Lost(NoReadableCopy):
    """``check_copies`` found what it looks for."""


@define
class Engine:
    """A rollout engine whose weights are tokens. ``broken``: its next method fails, having done nothing."""

    name: str
    held: EngineThing
    broken: bool = False
    transports: tuple[str, ...] = ("in_process",)
    _incoming: dict[Slot, str] = field(factory=dict)

    @property
    def weight_version(self) -> int | None:
        return self.held.version

    def pause_generation(self, mode: str = "abort") -> None:
        self.held = evolve(self.held, generating=False)

    def continue_generation(self) -> None:
        self.held = evolve(self.held, generating=self.held.version is not None)

    def flush_cache(self) -> None: ...

    def begin_update(self, manifest: Any, transport: Any) -> None:
        if self.broken:
            raise Injected("begin_update")
        self.held, self._incoming = EngineThing(), dict(transport.tensors())

    def check_weights(self, fingerprints: Mapping[str, str]) -> tuple[str, ...]:
        return ()

    def end_update(self, version: int) -> None:
        self.held = EngineThing(version, self._incoming)

    def abort_update(self) -> None:
        self.held = EngineThing()


@define
class FakeWorld:
    """``plan``: which actions fail, by their number in this event, and how; see ``lockstep``."""

    things: Things
    plan: Mapping[int, str] = field(factory=dict)
    appeared: bool = False
    grads_back: bool = False
    brought: frozenset[str] = frozenset(("weights", "optimizer", "rest", "groups"))
    short: bool = False
    trained: bool = True  # whether an optimizer is attached
    done: list[Action] = field(factory=list)
    complaints: list[str] = field(factory=list)
    weight_names: frozenset[str] = frozenset()
    session: SyncSession = field(init=False)
    engines: dict[str, Engine] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.engines = {name: Engine(name, held) for name, held in self.things.engines.items()}
        self.session = SyncSession(self.engines, False, "abort")

    # asking

    def nbytes(self, slot: Slot) -> int:
        return BYTES

    def region_bytes(self, region: Region) -> int:
        return BYTES

    def grad_bytes(self) -> int:
        return BYTES * self.things.grads

    def workspace_bytes(self) -> int:
        return BYTES * self.things.workspaces

    def graphs_captured(self) -> bool:
        return self.things.graphs

    def has_groups(self) -> bool:
        return True

    def groups_up(self) -> bool:
        return self.things.groups

    def has_optimizer(self) -> bool:
        return self.trained

    def optimizer_appeared(self) -> bool:
        return self.appeared and Region.OPTIMIZER in self.things.mapped

    def keeps_addresses(self) -> bool:
        return self.things.keeps_addresses

    def stream_ordered(self) -> bool:
        return self.things.stream_ordered

    def overlaps(self) -> bool:
        return self.things.overlaps

    def dropped(self) -> bool:
        return False

    def available_bytes(self) -> int | None:
        return 0 if self.short else None

    def mapped(self) -> frozenset[Region]:
        return self.things.mapped

    def installed(self) -> bool:
        return self.things.hooks

    def foresee(self, todo: Iterable[Action], facts: Facts) -> None: ...

    def left_undone(self, effect: str, call: Call) -> None: ...

    def finish(self, facts: Facts) -> None: ...

    def give_up(self) -> None: ...

    def settings(self) -> Settings:
        return Settings(dict.fromkeys(self.things.contents, BYTES))

    # what a session asks for

    @property
    def buffers(self) -> Mapping[int, Any]:
        return {part: Segment(part) for part in self.things.buffers}

    @property
    def backend(self) -> FakeWorld:
        return self

    def layout(self, slot: Slot) -> tuple[()]:
        return ()

    def read(self, facts: Facts, lease: Lease) -> dict[Any, Any]:
        found = {}
        for part, place in lease.sources.items():
            slot = facts.parts[part].slot
            found[slot] = self.things.contents[slot] if place is Copy.DEVICE else self.things.buffers[part]
            self._expect(found[slot] == facts.parts[part].fingerprint, f"the lease reads foreign bytes in {slot}")
        return found

    # doing

    def perform(self, action: Action, facts: Facts, call: Call) -> tuple[Any, int]:
        phase = self.plan.get(len(self.done))
        self.done.append(action)
        if phase == "before":
            raise Injected(action.do)
        if action.engine is not None:
            self.engines[action.engine].broken = phase == "inside"
            result = self.session.perform(action, facts, self)  # type: ignore[arg-type]
            self.things = evolve(self.things, engines={name: one.held for name, one in self.engines.items()})
        else:
            do = getattr(self, f"_{action.do}", None)
            result = None if do is None else do(action, facts, call)
        if phase is not None:
            raise Injected(action.do)
        return result, 0

    def _expect(self, so: bool, else_: str) -> None:
        if not so and self.things.hooks:  # without them a close has begun, and only that is left
            self.complaints.append(else_)

    def _let(self, **things: Any) -> None:
        self.things = evolve(self.things, **things)

    def _put(self, slot: Slot, token: str) -> None:
        """All of it, and so over what was going out of it."""
        self._let(contents={**self.things.contents, slot: token}, halves=_without(self.things.halves, [slot]))

    def _keep(self, slot: Slot, part: int) -> None:
        self._let(buffers={**self.things.buffers, part: self.things.contents[slot]})

    def measure(self, slots: Iterable[Slot]) -> Measured:
        found = {slot: self.things.contents[slot] for slot in slots}
        return Measured({slot: {"t": token} for slot, token in found.items()}, found, dict.fromkeys(found, BYTES))

    def _measure(self, action: Action, facts: Facts, call: Call) -> Measured:
        self._expect(Region.WEIGHTS in self.things.mapped, "weights are measured that are not mapped")
        return self.measure(slot for slot in VERSION_SLOTS if slot in self.things.contents)

    _freeze_phase = _settle_phase = _freeze_load = _adopt = _measure

    def _verify(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.slot is not None
        part = facts.parts[facts.device[action.slot]]
        self._expect(self.things.contents[action.slot] == part.fingerprint, f"{action.slot} is not what the facts say")

    def _check_copies(self, action: Action, facts: Facts, call: Call) -> None:
        for tag in lost_tags(facts):
            raise Lost(tag, facts.tags[tag], {})
        if Region.WEIGHTS not in facts.resident:
            for slot, part in facts.backups.items():
                if part not in facts.copies and not (SLOT_REGION[slot] in call.keep and facts.device.get(slot) == part):
                    raise Lost(slot.value, 0, {})

    def _copy_out(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.slot is not None
        assert action.part is not None
        known = facts.parts[action.part].fingerprint
        self._expect(self.things.contents[action.slot] == known, f"a copy is made of foreign bytes in {action.slot}")
        self._keep(action.slot, action.part)

    def _adopt_optimizer(self, action: Action, facts: Facts, call: Call) -> None:
        self.appeared = False

    def _back_up(self, action: Action, facts: Facts, call: Call) -> Measured:
        assert action.slot is not None
        found = self.measure([action.slot])
        part = take_measure(facts, found)[1][action.slot]
        if not well_copied(facts, part):
            self._keep(action.slot, part)
        return found

    def _drop_workspaces(self, action: Action, facts: Facts, call: Call) -> None:
        self._expect(not self.things.graphs, "workspaces are dropped under captured graphs")
        self._let(workspaces=False)

    def _discard_grads(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(grads=False)

    def _zero_grads(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(grads=self.things.grads or self.grads_back)

    def _suspend_groups(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(groups=False)

    _lower_sync_groups = _suspend_groups

    def _reload_groups(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(groups=True)

    _raise_sync_groups = _reload_groups

    def _pause(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.region is not None
        self._expect(action.region in self.things.mapped, f"{action.region} is paused twice")
        lost = {slot: fresh() for slot in self.things.contents if SLOT_REGION[slot] is action.region}
        self._let(mapped=self.things.mapped - {action.region}, contents={**self.things.contents, **lost})
        self._let(halves=_without(self.things.halves, lost))

    def _resume(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.region is not None
        self._expect(action.region not in self.things.mapped, f"{action.region} is resumed twice")
        self._let(mapped=self.things.mapped | {action.region})

    def _copy_in(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.slot is not None
        assert action.part is not None
        self._expect(SLOT_REGION[action.slot] in self.things.mapped, f"{action.slot} is restored, and not mapped")
        known, copy = facts.parts[action.part].fingerprint, self.things.buffers.get(action.part)
        self._expect(copy is not None and known == copy, f"the copy of {action.slot} is not its part")
        self._put(action.slot, copy or fresh())

    def _arrive(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.slot is not None
        assert action.part is not None
        known = facts.parts[action.part].fingerprint
        self._expect(self.things.contents[action.slot] == known, f"what came in {action.slot} is not its part")

    def _make_room(self, action: Action, facts: Facts, call: Call) -> None:
        """From here on, and until something else is put there, slot and buffer together have all of it."""
        assert action.slot is not None
        self._let(halves={**self.things.halves, action.slot: self.things.contents[action.slot]})

    def _exchange(self, action: Action, facts: Facts, call: Call) -> None:
        """Done or not begun; the facts say "half moved" of both, and ``choosing`` adds what is in between."""
        assert action.slot is not None
        assert action.part is not None
        assert action.into is not None
        going = self.things.halves
        self._expect(action.slot in going, f"no room was made for {action.slot}")
        self._copy_out(action, facts, call)
        self._copy_in(evolve(action, part=action.into), facts, call)
        self._let(halves=going)  # the buffer alone has all of it

    def _put_together(self, action: Action, facts: Facts, call: Call) -> None:
        assert action.slot is not None
        assert action.part is not None
        known, whole = facts.parts[action.part].fingerprint, self.things.halves.get(action.slot)
        self._expect(whole is not None and known == whole, f"what went out of {action.slot} is not whole any more")
        self._let(buffers={**self.things.buffers, action.part: whole or fresh()})

    def _read_back(self, action: Action, facts: Facts, call: Call) -> Measured:
        slots = [slot for slot in self.things.contents if SLOT_REGION[slot] in self.things.mapped]
        if self.optimizer_appeared() and facts.backups.get(Slot.OPTIMIZER) in facts.copies:
            slots.remove(Slot.OPTIMIZER)
        return self.measure(slots)

    def _bring_back(self, action: Action, facts: Facts, call: Call) -> None:
        for slot, part in {**facts.version_of(ACTOR).parts, **facts.backups}.items():
            region = SLOT_REGION[slot]
            if facts.device.get(slot) == part or (region not in self.things.mapped and region not in self.brought):
                continue
            self._let(mapped=self.things.mapped | {region})
            going = self.things.halves
            if facts.halves.get(slot) == part and slot in going:
                self._put(slot, going[slot])
            elif part in self.things.buffers:
                self._put(slot, self.things.buffers[part])
            self._let(halves=going)  # what is half moved is in its buffer before the slot is written over
        if "groups" in self.brought:
            self._let(groups=True)

    def _remove_hooks(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(hooks=False)

    def _free_copies(self, action: Action, facts: Facts, call: Call) -> None:
        self._let(buffers={})

    # around events

    def remember(self, facts: Facts) -> None:
        """The parts of versions that may be forgotten while an engine holds them."""
        held = {one.version for one in self.things.engines.values()} | {facts.published}
        known = {**self.things.ledger, **{number: version.parts for number, version in facts.versions.items()}}
        self._let(ledger={number: known[number] for number in held if number is not None})

    def forget(self, facts: Facts) -> None:
        """Give back what the facts no longer know."""
        self._let(buffers={part: token for part, token in self.things.buffers.items() if part in facts.copies})
        self._let(halves={slot: token for slot, token in self.things.halves.items() if slot in facts.halves})


def executor(world: FakeWorld, facts: Facts, effects: Mapping[str, Any], kind: type[Executor] = Executor) -> Executor:
    return kind(world, Journal(world), facts, effects)  # type: ignore[arg-type]
