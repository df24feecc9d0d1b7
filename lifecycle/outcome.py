"""What is true while an action runs and after it: pure functions over facts.

``during`` says what can no longer be relied on once the action has begun, so that a failure half-way leaves true facts.
``after`` says what holds when it is done; its ``result`` is what the world reported, or None in a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from lifecycle import versions as v
from lifecycle.actions import Action, Call
from lifecycle.versions import ACTOR, Facts
from lifecycle.work import own_facts
from states.resources import SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot


@frozen
class Measured:
    """Fingerprints that the world found: per slot the tensors', the part's, and the part's bytes."""

    tensors: Mapping[Slot, Mapping[str, str]]
    fingerprints: Mapping[Slot, str]
    nbytes: Mapping[Slot, int]


@frozen
class Settings:
    """What ``after`` must know of the world's present shape."""

    nbytes: Mapping[Slot, int]
    host: Copy = Copy.HOST
    places: Mapping[Slot, Copy] = field(factory=dict)  # of copies that are elsewhere than the others

    def place(self, slot: Slot) -> Copy:
        """What a copy of the slot's part counts as."""
        return self.places.get(slot, self.host)


After = Callable[[Facts, Action, Any, Call, Settings], Facts]


def during(facts: Facts, action: Action) -> Facts:
    if action.own is not None:
        own = action.own  # one that is harmless has changed nothing until it has ended
        return facts if own.harmless else v.own_begun(facts, own_facts(own.gives | own.takes))
    if action.do in ("copy_in", "arrive"):
        assert action.slot is not None
        return v.overwritten(facts, action.slot)
    if action.do == "exchange":
        assert action.slot is not None
        assert action.part is not None
        return v.half_moved(facts, action.slot, action.part)
    if action.do == "adopt_optimizer":
        # whatever comes of it, what was measured before says nothing about the whole state any more
        facts, ids = v.fresh_parts(facts, [Slot.OPTIMIZER], {})
        return evolve(facts, backups={**facts.backups, **ids})
    if action.do == "pause":
        assert action.region is not None
        return v.contents_lost(facts, action.region)  # before the memory is
    if action.do == "bring_back":
        home = {**facts.version_of(ACTOR).parts, **facts.backups}  # anything else may be written over
        return evolve(facts, device={slot: part for slot, part in facts.device.items() if home.get(slot) == part})
    if action.do in ("engine_send", "engine_abort"):
        assert action.engine is not None
        return v.with_engines(facts, [action.engine], None)
    return facts


def looked_again(facts: Facts, mapped: frozenset[Region], groups_up: bool, syncing: bool) -> Facts:
    """What an effect that failed may have done all the same: regions and groups are as the world says they are."""

    def there(found: Mapping[Slot, int]) -> dict[Slot, int]:
        return {slot: part for slot, part in found.items() if SLOT_REGION[slot] in mapped}

    facts = evolve(facts, resident=mapped, device=there(facts.device), arriving=there(facts.arriving))
    if (syncing or facts.sync_groups) and not facts.groups_up:
        return evolve(facts, sync_groups=groups_up)
    return evolve(facts, groups_up=groups_up, sync_groups=False)


def refuted(facts: Facts, action: Action) -> Facts:
    """Bytes were not what they should be: if they came from a copy, it is not to be relied on."""
    part = {"copy_in": action.part, "arrive": action.part, "exchange": action.into}.get(action.do)
    return facts if part is None else evolve(facts, doubted=facts.doubted | {part})


def after(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    if action.own is not None:
        return v.own_changed(facts, own_facts(action.own.gives), own_facts(action.own.takes))
    change = _AFTER.get(action.do)
    return facts if change is None else change(facts, action, result, call, settings)


def take_measure(facts: Facts, found: Measured) -> tuple[Facts, dict[Slot, int]]:
    """The parts that these bytes are; the device shows them from now on."""
    parts: dict[Slot, int] = {}
    for slot, tensors in found.tensors.items():
        facts, parts[slot] = v.measured(facts, slot, tensors, found.fingerprints[slot], found.nbytes[slot])
    return evolve(facts, device={**facts.device, **parts}), parts


def _weights_parts(facts: Facts, result: Measured | None) -> tuple[Facts, dict[Slot, int]]:
    """Measured parts of the weights slots, or (predicting) those the device shows now."""
    if result is None:
        return facts, {slot: part for slot, part in facts.device.items() if slot in VERSION_SLOTS}
    return take_measure(facts, result)


def _verified(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    """A result means that a change was found and is to be adopted as the shown tag's new version."""
    if result is None:
        return facts
    return _adopted(facts, action, result, call, settings)


def _adopted(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    shown = call.shown or ACTOR
    old = facts.version_of(shown)
    facts, parts = _weights_parts(facts, result)
    parts = {**{slot: facts.device[slot] for slot in old.parts}, **parts}
    if parts == dict(old.parts):
        return facts
    return v.adopt(facts, [shown, *followers(facts, shown)] if call.event == "adopt" else [shown], parts)


def followers(facts: Facts, shown: str) -> list[str]:
    """Other tags of the shown tag's old version that have no complete copy of it any more."""
    lost = v.lost_tags(facts)
    return [tag for tag, at in facts.tags.items() if tag != shown and at == facts.tags[shown] and tag in lost]


def _copied(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.part is not None
    return v.copied(facts, action.part, settings.place(facts.parts[action.part].slot))


def _backed_up(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    assert action.slot is not None
    assert action.part is not None
    part = action.part
    if result is not None:
        facts, parts = take_measure(facts, result)
        part = parts[action.slot]
        facts = v.backed_up(facts, action.slot, part)
    return v.copied(facts, part, settings.place(action.slot))


def _grads_gone(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, grads_discarded=True, backward_seen=False)


def _paused(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.region is not None
    return v.paused(facts, action.region)


def _resumed(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.region is not None
    return v.resumed(facts, action.region)


def _copied_in(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.slot is not None
    assert action.part is not None
    return (v.arriving if action.late else v.holding)(facts, action.slot, action.part)


def _exchanged(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.slot is not None
    assert action.into is not None
    return v.holding(v.put_together(facts, action.slot, settings.place(action.slot)), action.slot, action.into)


def _put_together(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.slot is not None
    return v.put_together(facts, action.slot, settings.place(action.slot))


def _phase_opened(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return v.open_phase(facts, settings.nbytes, call.implicit)


def _phase_frozen(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    facts, parts = _weights_parts(facts, result)
    return v.end_phase(facts, parts)


def _phase_settled(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    """Unchanged: the base again. Changed: the base, to be restored next, where wanted and possible; else kept."""
    phase = facts.phase
    assert phase is not None
    facts, parts = _weights_parts(facts, result)
    base = facts.versions[phase.base].parts
    same = parts == dict(base)
    restorable = call.restore_aborted and all(
        part in facts.copies for part in base.values() if part not in parts.values()
    )
    optimizer_back = not phase.steps or (call.restore_aborted and _optimizer_restorable(facts))
    if not (same or (restorable and optimizer_back)):
        return v.end_phase(facts, parts)
    backups = dict(facts.backups)
    device = dict(facts.device)
    if optimizer_back:
        backups[Slot.OPTIMIZER] = phase.optimizer_base
        if not phase.steps:
            device[Slot.OPTIMIZER] = phase.optimizer_base
    return evolve(
        facts,
        tags={**facts.tags, ACTOR: phase.base},
        backups=backups,
        device=device,
        phase=None,
        backward_seen=False,
    )


def _optimizer_restorable(facts: Facts) -> bool:
    phase = facts.phase
    return phase is not None and phase.optimizer_base in facts.copies


def _load_opened(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert call.tag is not None
    return v.open_load(facts, call.tag, settings.nbytes)


def _load_frozen(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    facts, parts = _weights_parts(facts, result)
    return v.end_load(facts, parts)


def _load_reopened(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    """Open again while the device holds what was written, and given up where it shows what it showed.

    Where it holds neither, the copy of what was written is all that this event has left, and the tag keeps it.
    """
    before = call.before
    assert before.load is not None
    tags = {**facts.tags, before.load.tag: before.tags[before.load.tag]}
    if not v.shown(facts, before.load.version):
        return evolve(facts, tags=tags) if v.shown(facts, tags[call.shown or ACTOR]) else facts
    working = before.versions[before.load.version]
    facts = evolve(facts, versions={**facts.versions, working.id: working}, tags=tags, load=before.load)
    parts = {**facts.parts, **{p: before.parts[p] for p in working.parts.values()}}
    return evolve(facts, parts=parts, device={**facts.device, **working.parts})


def _tag_moved(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert call.tag is not None
    assert call.of is not None
    return v.move_tag(facts, call.tag, facts.tags[call.of])


def _leased(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    tag = call.tag or ACTOR
    where = v.sources(facts, tag)
    if call.host_copy:
        where = {part: facts.copies[part] for part in where}
    return v.leased(facts, facts.tags[tag], where, "sync")[0]


def _lease_ended(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, leases=tuple(lease for lease in facts.leases if lease.reader != "sync"))


def _engine_took(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    assert action.engine is not None
    return v.with_engines(facts, [action.engine], v.sync_version(facts, call.tag or ACTOR))


def _engine_aborted(facts: Facts, action: Action, result: bool | None, call: Call, settings: Settings) -> Facts:
    """One that had seen no byte, and lives, holds what it held."""
    assert action.engine is not None
    return (
        facts if result is not False else v.with_engines(facts, [action.engine], call.before.engines.get(action.engine))
    )


def _published(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, published=v.sync_version(facts, call.tag or ACTOR))


def _withdrawn(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, published=call.before.published)


def rotated(tags: Mapping[str, int], rotate: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Moves in the given order, each seeing the ones before it."""
    moved = dict(tags)
    for name, of in rotate:
        moved[name] = moved[of]
    return moved


def _rotated(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, tags=rotated(facts.tags, call.rotate))


def _rotated_back(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, tags=call.before.tags)


def _read_back(facts: Facts, action: Action, result: Measured | None, call: Call, settings: Settings) -> Facts:
    """``result``: what was measured in the slots that are mapped."""
    if result is None:
        return facts
    before = facts.device
    facts, parts = take_measure(evolve(facts, device={}), result)
    # what the device held is current, though changed since its copy, and so is what was never copied; else the copy is
    current = {
        slot: parts[slot]
        for slot, part in facts.backups.items()
        if slot in parts and (before.get(slot) == part or part not in facts.copies)
    }
    return evolve(facts, backups={**facts.backups, **current})


def _business_closed(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    """A whole working version is kept; a load that was cut short is worth nothing."""
    if facts.load is not None:
        facts = evolve(facts, load=None)
    if facts.phase is None:
        return facts
    slots = facts.versions[facts.phase.version].parts  # all on the device: nothing is paused inside a phase
    return v.end_phase(facts, {slot: facts.device[slot] for slot in slots})


def _copies_freed(facts: Facts, action: Action, result: Any, call: Call, settings: Settings) -> Facts:
    return evolve(facts, copies={})


_AFTER: dict[str, After] = {
    "verify": _verified,
    "copy_out": _copied,
    "back_up": _backed_up,
    "discard_grads": _grads_gone,
    "zero_grads": lambda facts, *_: evolve(facts, grads_discarded=False),
    "suspend_groups": lambda facts, *_: evolve(facts, groups_up=False),
    "reload_groups": lambda facts, *_: evolve(facts, groups_up=True),
    "raise_sync_groups": lambda facts, *_: evolve(facts, sync_groups=True),
    "lower_sync_groups": lambda facts, *_: evolve(facts, sync_groups=False),
    "pause": _paused,
    "resume": _resumed,
    "copy_in": _copied_in,
    "arrive": _copied_in,
    "land": lambda facts, *_: v.landed(facts),
    "exchange": _exchanged,
    "put_together": _put_together,
    "open_phase": _phase_opened,
    "freeze_phase": _phase_frozen,
    "settle_phase": _phase_settled,
    "open_load": _load_opened,
    "freeze_load": _load_frozen,
    "reopen_load": _load_reopened,
    "drop_load": lambda facts, *_: v.drop_load(facts),
    "adopt": _adopted,
    "move_tag": _tag_moved,
    "lease": _leased,
    "release_lease": _lease_ended,
    "engine_end": _engine_took,
    "engine_abort": _engine_aborted,
    "publish": _published,
    "withdraw": _withdrawn,
    "rotate": _rotated,
    "rotate_back": _rotated_back,
    "read_back": _read_back,
    "close_business": _business_closed,
    "free_copies": _copies_freed,
}
