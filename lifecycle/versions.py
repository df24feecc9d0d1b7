"""Versions, parts, tags, copies and leases: what the controller knows, as one frozen value, and how it may change.

Theory of operation. A *part* is an immutable content of one slot (frozen, trained or state weights; optimizer; rest)
with an id and, once measured, a fingerprint. A *version* is one part per weights slot; a *tag* points at a version.
The device holds at most one part per slot (``device``), and each part may have a copy elsewhere (``copies``).
Optimizer state and rest are not versioned: ``backups`` names the one current part of each. A part that is being
written (open phase, open load) has no fingerprint yet. Every function here is pure: it takes ``Facts`` and returns
``Facts``; mappings inside are never mutated. What is not referenced any more is dropped by ``references.prune``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from lifecycle.errors import NoReadableCopy
from lifecycle.fingerprint import part_fingerprint
from states.resources import BACKUP_SLOTS, SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot

ACTOR = "actor"


@frozen
class Part:
    """One content of one slot. ``tensors`` maps name to fingerprint; both are empty until it is measured."""

    id: int
    slot: Slot
    nbytes: int
    fingerprint: str | None = None
    tensors: Mapping[str, str] = field(factory=dict)


@frozen
class Version:
    """A numbered, immutable set of weights; ``working`` while a phase or load is still writing it.

    ``step`` counts the training phases that led to it; ``fingerprint`` is None while it is working.
    """

    id: int
    step: int
    parts: Mapping[Slot, int]
    fingerprint: str | None = None
    working: bool = False


@frozen
class Phase:
    """An open training phase: what it started from, to go back to or compare with."""

    version: int
    base: int
    base_device: Mapping[Slot, int]
    optimizer_base: int
    implicit: bool = False
    steps: int = 0


@frozen
class Load:
    """An open load: the tag that gets the new version, and what the device held before."""

    tag: str
    version: int
    device_before: Mapping[Slot, int]


@frozen
class Lease:
    """A reader of a version's bytes. ``sources`` says per part where it reads."""

    id: int
    version: int
    sources: Mapping[int, Copy]
    reader: str

    @property
    def on_device(self) -> bool:
        return Copy.DEVICE in self.sources.values()


@frozen
class Scope:
    """A using() or hold() block: what it shows, and the flat state to go back to."""

    id: int
    tag: str
    back: str


@frozen
class Facts:
    """Everything the controller knows about its actor, apart from the state itself."""

    tags: Mapping[str, int]
    versions: Mapping[int, Version]
    parts: Mapping[int, Part]
    device: Mapping[Slot, int]
    backups: Mapping[Slot, int]
    resident: frozenset[Region]
    copies: Mapping[int, Copy] = field(factory=dict)
    arriving: Mapping[Slot, int] = field(factory=dict)  # parts that the device holds as soon as they have come
    halves: Mapping[Slot, int] = field(factory=dict)  # parts whose bytes are partly in their copy, partly in the slot
    doubted: frozenset[int] = frozenset()  # parts whose copy was not what it should be when it was last restored
    phase: Phase | None = None
    load: Load | None = None
    leases: tuple[Lease, ...] = ()
    scopes: tuple[Scope, ...] = ()
    groups_up: bool = True
    sync_groups: bool = False
    grads_discarded: bool = False
    backward_seen: bool = False
    engines: Mapping[str, int | None] = field(factory=dict)  # what each engine holds, as far as we know
    published: int | None = None
    own: frozenset[str] = frozenset()  # facts of the machine's own that are true
    own_doubted: frozenset[str] = frozenset()  # those that an effect which stopped half-way may have changed
    next_id: int = 1

    def version_of(self, tag: str) -> Version:
        return self.versions[self.tags[tag]]


def version_fingerprint(parts: Iterable[Part]) -> str | None:
    """One fingerprint over the parts of a version, in slot order; None while one is unmeasured."""
    entries = [(part.slot.value, "part", (part.nbytes,), part.fingerprint or "") for part in parts]
    return part_fingerprint(entries) if all(found for *_, found in entries) else None


def first_facts(
    parts: Iterable[Part],
    tags: Iterable[str],
    resident: Iterable[Region],
    groups_up: bool,
    host: Copy,
    own: Iterable[str] = (),
) -> Facts:
    """Attached: one version, step 0, that every tag points at. A part without bytes needs no copying: it has one."""
    by_slot = {part.slot: part for part in parts}
    weights = {slot: by_slot[slot] for slot in VERSION_SLOTS if slot in by_slot}
    first_id = max(part.id for part in by_slot.values()) + 1
    version = Version(first_id, 0, {s: p.id for s, p in weights.items()}, version_fingerprint(weights.values()))
    return Facts(
        tags=dict.fromkeys((ACTOR, *tags), version.id),
        versions={version.id: version},
        parts={part.id: part for part in by_slot.values()},
        device={slot: part.id for slot, part in by_slot.items()},
        backups={slot: by_slot[slot].id for slot in BACKUP_SLOTS if slot in by_slot},
        resident=frozenset(resident),
        copies={part.id: host for part in by_slot.values() if not part.nbytes},
        groups_up=groups_up,
        own=frozenset(own),
        next_id=version.id + 1,
    )


# reading


def copies_of(facts: Facts, part: int) -> tuple[Copy, ...]:
    """Where the part can be read now, the most direct first."""
    found = facts.parts.get(part)
    places = [Copy.DEVICE] if found is not None and facts.device.get(found.slot) == part else []
    return (*places, *([facts.copies[part]] if part in facts.copies else []))


def sources(facts: Facts, tag: str) -> dict[int, Copy]:
    """For each part of the tag's version, the copy to read. Raises NoReadableCopy naming the parts without one."""
    version = facts.version_of(tag)
    places = {part: copies_of(facts, part) for part in version.parts.values()}
    if not all(places.values()):
        seen = {facts.parts[part].slot.value: [p.value for p in found] for part, found in places.items()}
        raise NoReadableCopy(tag, version.id, seen)
    return {part: found[0] for part, found in places.items()}


def least_direct(found: Iterable[Copy]) -> Copy:
    order = list(Copy)
    return max(found, key=order.index)


def lost_tags(facts: Facts) -> tuple[str, ...]:
    """Tags whose version has a part without any copy; one that is half moved has one, in two pieces."""
    halves = set(facts.halves.values())
    return tuple(
        tag
        for tag, version in facts.tags.items()
        if not all(p in halves or copies_of(facts, p) for p in version_parts(facts, version))
    )


def version_parts(facts: Facts, version: int) -> tuple[int, ...]:
    return tuple(facts.versions[version].parts.values())


def shown(facts: Facts, version: int) -> bool:
    """Whether the device holds every part of the version."""
    return facts.versions[version].parts.items() <= facts.device.items()


def sync_version(facts: Facts, tag: str) -> int:
    """What a sync of this tag sends: the leased version, wherever the tag has moved since."""
    return next((lease.version for lease in facts.leases if lease.reader == "sync"), facts.tags[tag])


# changing


def fresh_parts(facts: Facts, slots: Iterable[Slot], nbytes: Mapping[Slot, int]) -> tuple[Facts, dict[Slot, int]]:
    """New unmeasured parts, shown by the device: what it holds there is being written."""
    made = {slot: Part(facts.next_id + n, slot, nbytes.get(slot, 0)) for n, slot in enumerate(slots)}
    ids = {slot: part.id for slot, part in made.items()}
    return (
        evolve(
            facts,
            parts={**facts.parts, **{p.id: p for p in made.values()}},
            device={**facts.device, **ids},
            next_id=facts.next_id + len(made),
        ),
        ids,
    )


def work_on(facts: Facts, tag: str, nbytes: Mapping[Slot, int]) -> tuple[Facts, Version]:
    """A working version of the tag in all weights slots; the tag does not point at it yet."""
    before = facts.version_of(tag)
    facts, ids = fresh_parts(facts, before.parts, nbytes)
    version = Version(facts.next_id, before.step, ids, working=True)
    return evolve(facts, versions={**facts.versions, version.id: version}, next_id=facts.next_id + 1), version


def open_phase(facts: Facts, nbytes: Mapping[Slot, int], implicit: bool) -> Facts:
    """'actor' points at a working version; its base and optimizer state stay referenced until the phase ends."""
    base, device = facts.version_of(ACTOR), facts.device
    facts, version = work_on(facts, ACTOR, nbytes)
    optimizer = facts.backups[Slot.OPTIMIZER]
    facts, ids = fresh_parts(facts, [Slot.OPTIMIZER], nbytes)
    return evolve(
        facts,
        backups={**facts.backups, **ids},
        tags={**facts.tags, ACTOR: version.id},
        phase=Phase(version.id, base.id, device, optimizer, implicit),
    )


def measured(facts: Facts, slot: Slot, tensors: Mapping[str, str], fingerprint: str, nbytes: int) -> tuple[Facts, int]:
    """The part that these bytes are: a known one with equal fingerprints, the device's unmeasured one, or a new one."""
    for part in facts.parts.values():
        if part.slot is slot and part.fingerprint == fingerprint and part.tensors == tensors:
            return facts, part.id
    on_device = facts.parts.get(facts.device.get(slot, 0))
    reuse = on_device is not None and on_device.fingerprint is None
    part_id = on_device.id if on_device is not None and reuse else facts.next_id
    part = Part(part_id, slot, nbytes, fingerprint, dict(tensors))
    next_id = facts.next_id if reuse else facts.next_id + 1
    return evolve(facts, parts={**facts.parts, part_id: part}, next_id=next_id), part_id


def freeze(facts: Facts, version: Version, parts: Mapping[Slot, int], step: int) -> Facts:
    """The working version is complete: it has these measured parts, and the device shows them."""
    whole = version_fingerprint(facts.parts[part] for part in parts.values())
    done = Version(version.id, step, dict(parts), whole)
    return evolve(facts, versions={**facts.versions, version.id: done}, device={**facts.device, **parts})


def end_phase(facts: Facts, parts: Mapping[Slot, int]) -> Facts:
    """The phase's weights are these parts; 'actor' points at a finished version."""
    assert facts.phase is not None
    version = facts.versions[facts.phase.version]
    facts = freeze(facts, version, parts, version.step + 1)
    return evolve(facts, phase=None, backward_seen=False)


def open_load(facts: Facts, tag: str, nbytes: Mapping[Slot, int]) -> Facts:
    before = facts.device
    facts, version = work_on(facts, tag, nbytes)
    return evolve(facts, load=Load(tag, version.id, before))


def end_load(facts: Facts, parts: Mapping[Slot, int]) -> Facts:
    """The tag points at what was written."""
    assert facts.load is not None
    version = facts.versions[facts.load.version]
    tags = {**facts.tags, facts.load.tag: version.id}
    return evolve(freeze(facts, version, parts, version.step), tags=tags, load=None)


def drop_load(facts: Facts) -> Facts:
    """What was written is worth nothing: the device holds no known weights."""
    device = {slot: part for slot, part in facts.device.items() if slot not in VERSION_SLOTS}
    return evolve(facts, device=device, load=None)


def adopt(facts: Facts, tags: Iterable[str], parts: Mapping[Slot, int]) -> Facts:
    """What the device holds is a new version that these tags point at."""
    tags = tuple(tags)
    step = facts.version_of(tags[0]).step
    version = Version(facts.next_id, step, dict(parts), version_fingerprint(facts.parts[p] for p in parts.values()))
    return evolve(
        facts,
        versions={**facts.versions, version.id: version},
        tags={**facts.tags, **dict.fromkeys(tags, version.id)},
        device={**facts.device, **parts},
        next_id=facts.next_id + 1,
    )


def move_tag(facts: Facts, name: str, version: int) -> Facts:
    return evolve(facts, tags={**facts.tags, name: version})


def copied(facts: Facts, part: int, place: Copy) -> Facts:
    return evolve(facts, copies={**facts.copies, part: place}, doubted=facts.doubted - {part})


def well_copied(facts: Facts, part: int) -> bool:
    """Whether the device's bytes of the part may go; a doubted copy is made again while they are there."""
    return part in facts.copies and part not in facts.doubted


def overwritten(facts: Facts, slot: Slot) -> Facts:
    """The slot's bytes are being replaced: until ``holding`` the device holds nothing there."""
    device = {s: p for s, p in facts.device.items() if s is not slot}
    return evolve(facts, device=device, arriving={s: p for s, p in facts.arriving.items() if s is not slot})


def holding(facts: Facts, slot: Slot, part: int) -> Facts:
    return evolve(facts, device={**facts.device, slot: part})


def arriving(facts: Facts, slot: Slot, part: int) -> Facts:
    return evolve(holding(facts, slot, part), arriving={**facts.arriving, slot: part})


def landed(facts: Facts) -> Facts:
    """As if all that is on its way had come."""
    return evolve(facts, arriving={}) if facts.arriving else facts


def half_moved(facts: Facts, slot: Slot, part: int) -> Facts:
    """The part's bytes are being copied out, over what an earlier copy of it was, and overwritten in the slot."""
    copies = {held: place for held, place in facts.copies.items() if held != part}
    return evolve(overwritten(facts, slot), copies=copies, halves={**facts.halves, slot: part})


def put_together(facts: Facts, slot: Slot, host: Copy) -> Facts:
    """The copy of what was half moved is complete."""
    facts = copied(facts, facts.halves[slot], host)
    return evolve(facts, halves={s: p for s, p in facts.halves.items() if s is not slot})


def backed_up(facts: Facts, slot: Slot, part: int) -> Facts:
    """This part is the current content of an unversioned slot."""
    return evolve(facts, backups={**facts.backups, slot: part}, device={**facts.device, slot: part})


def contents_lost(facts: Facts, region: Region) -> Facts:
    """The device holds nothing in this region any more."""
    lost = {slot for slot in facts.device.keys() | facts.arriving.keys() if SLOT_REGION[slot] is region}
    if not lost:
        return facts
    device = {slot: part for slot, part in facts.device.items() if slot not in lost}
    return evolve(facts, device=device, arriving={s: p for s, p in facts.arriving.items() if s not in lost})


def paused(facts: Facts, region: Region) -> Facts:
    return evolve(contents_lost(facts, region), resident=facts.resident - {region})


def resumed(facts: Facts, region: Region) -> Facts:
    return evolve(facts, resident=facts.resident | {region})


def leased(facts: Facts, version: int, where: Mapping[int, Copy], reader: str) -> tuple[Facts, Lease]:
    lease = Lease(facts.next_id, version, dict(where), reader)
    return evolve(facts, leases=(*facts.leases, lease), next_id=facts.next_id + 1), lease


def released(facts: Facts, lease: int) -> Facts:
    return evolve(facts, leases=tuple(held for held in facts.leases if held.id != lease))


def own_begun(facts: Facts, changing: Iterable[str]) -> Facts:
    """An effect that changes these facts has begun: until one has ended, nobody knows."""
    return evolve(facts, own_doubted=facts.own_doubted.union(changing))


def own_changed(facts: Facts, gives: frozenset[str], takes: frozenset[str]) -> Facts:
    return evolve(facts, own=facts.own - takes | gives, own_doubted=facts.own_doubted - takes - gives)


def with_engines(facts: Facts, names: Iterable[str], version: int | None) -> Facts:
    return evolve(facts, engines={**facts.engines, **dict.fromkeys(names, version)})
