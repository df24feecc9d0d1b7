"""What each effect has to do now: pure functions from facts and call to actions. Nothing here acts.

An effect with nothing to do yields no action; so a row of the table lists everything that may be needed, and the plan
is what is left. The executor asks again before each effect, with the facts of that moment; ``plan`` asks with
predicted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from attrs import evolve

from lifecycle.actions import BOTH, IN, OUT, Action, Call, Probe
from lifecycle.errors import NoReadableCopy
from lifecycle.versions import ACTOR, Facts, sync_version, well_copied
from states.resources import SLOT_REGION, VERSION_SLOTS, AnyFact, Copy, Fact, Region, Slot
from states.spec import Effect

Work = Callable[[Facts, Call, Probe], Iterable[Action]]


def _always(do: str) -> Work:
    return lambda facts, call, probe: (Action(do),)


def target_version(facts: Facts, call: Call) -> int:
    """The version the event is to show: its tag's, the shown tag's after a load, the actor's after a recovery."""
    tag = call.shown if call.event in ("finish_load", "abort_load") else call.tag
    return facts.tags[tag or ACTOR]


def stale_slots(facts: Facts, version: int) -> list[Slot]:
    """Slots in which the device does not hold the version's part."""
    return [slot for slot, part in facts.versions[version].parts.items() if facts.device.get(slot) != part]


def _touched_slots(facts: Facts, call: Call) -> list[Slot]:
    """Weights slots whose device bytes this event destroys or publishes."""
    held = [slot for slot in VERSION_SLOTS if slot in facts.device]
    if call.event == "switch":
        stale = stale_slots(facts, target_version(facts, call))
        return [slot for slot in held if slot in stale]
    if call.event == "start_sync":
        parts = facts.versions[target_version(facts, call)].parts
        return [slot for slot in held if facts.device[slot] == parts.get(slot)]
    return held


def _verify(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """What is copied next is read beside that copy, where the device can."""
    if not call.verify:
        return
    copied = {action.slot for action in _copy_out(facts, call, probe)} if probe.overlaps() else ()
    for slot in _touched_slots(facts, call):
        yield Action("verify", slot, facts.device[slot], late=slot in copied)


def _wanted_elsewhere(facts: Facts, call: Call, part: int) -> bool:
    """Whether anything still needs the part once this event has run."""
    if call.event == "begin_training":
        return any(part in facts.versions[v].parts.values() for t, v in facts.tags.items() if t != ACTOR)
    if call.event == "start_sync":
        return call.host_copy
    return any(part in facts.versions[v].parts.values() for v in facts.tags.values())


def _copy_out(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    exchanged = {action.slot for action in _exchange(facts, call, probe)}
    for slot in _touched_slots(facts, call):
        part = facts.device[slot]
        if slot not in exchanged and not well_copied(facts, part) and _wanted_elsewhere(facts, call, part):
            yield Action("copy_out", slot, part, nbytes=probe.nbytes(slot), direction=OUT)


def _exchange(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """In a switch, where both ways can be had at once: what goes out is copied while its successor comes in."""
    if call.event != "switch" or not probe.overlaps():
        return
    target, both = facts.versions[target_version(facts, call)].parts, []
    for slot in _touched_slots(facts, call):
        part, into = facts.device[slot], target[slot]
        if not well_copied(facts, part) and _wanted_elsewhere(facts, call, part) and into in facts.copies:
            both.append((slot, part, into))
    for slot, part, _ in both:  # where there is none, nothing has been moved
        yield Action("make_room", slot, part)
    for slot, part, into in both:
        yield Action("exchange", slot, part, nbytes=probe.nbytes(slot), direction=BOTH, into=into, tag=call.tag)


def _put_together(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    for slot, part in facts.halves.items():
        yield Action("put_together", slot, part, nbytes=probe.nbytes(slot), direction=OUT)


def _copy_out_loaded(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    for slot in stale_slots(facts, target_version(facts, call)):
        part = facts.device[slot]
        if not well_copied(facts, part):
            yield Action("copy_out", slot, part, nbytes=probe.nbytes(slot), direction=OUT)


def _reopen_load(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("reopen_load"),) if facts.load is None else ()


def _copy_out_survivors(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    yield from _put_together(facts, call, probe)
    wanted = {part for v in facts.tags.values() for part in facts.versions[v].parts.values()}
    for slot in stale_slots(facts, target_version(facts, call)):
        part = facts.device.get(slot)
        if part is not None and part in wanted and not well_copied(facts, part):
            yield Action("copy_out", slot, part, nbytes=probe.nbytes(slot), direction=OUT)


def _copy_out_everything(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """Where one rank has lost its memory the others, which have not, go to sleep with it."""
    yield from _put_together(facts, call, probe)
    wanted = {part for v in facts.tags.values() for part in facts.versions[v].parts.values()}
    for slot in VERSION_SLOTS:
        part = facts.device.get(slot)
        if part in wanted and part is not None and not well_copied(facts, part):
            yield Action("copy_out", slot, part, nbytes=probe.nbytes(slot), direction=OUT)
    yield from _back_up(facts, call, probe)


def _adopt_optimizer(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("adopt_optimizer", Slot.OPTIMIZER),) if probe.optimizer_appeared() else ()


def _back_up(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    for slot, part in facts.backups.items():
        region = SLOT_REGION[slot]
        if facts.device.get(slot) == part and region not in call.keep:  # anything else there is not the current content
            yield Action("back_up", slot, part, region, nbytes=probe.nbytes(slot), direction=OUT)


def _drop_workspaces(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    kept = Region.WORKSPACES in call.keep or probe.graphs_captured()
    nbytes = 0 if kept else probe.workspace_bytes()
    return (Action("drop_workspaces", region=Region.WORKSPACES, nbytes=nbytes),) if nbytes else ()


def _discard_grads(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    kept = call.event == "sleep" and Region.GRADS in call.keep
    nbytes = 0 if kept else probe.grad_bytes()
    return (Action("discard_grads", region=Region.GRADS, nbytes=nbytes),) if nbytes else ()


def _suspend_groups(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("suspend_groups"),) if facts.groups_up and probe.has_groups() else ()


def _reload_groups(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("reload_groups"),) if not facts.groups_up and probe.has_groups() else ()


def _raise_sync_groups(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("raise_sync_groups"),) if not facts.groups_up and probe.has_groups() else ()


def _lower_sync_groups(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("lower_sync_groups"),) if facts.sync_groups else ()


#: Out: weights before optimizer, whose first copy has the higher peak (alibaba/ChatLearn pull 58).
_PAUSED = (Region.WEIGHTS, Region.OPTIMIZER, Region.REST)


def _pause(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    for region in _PAUSED:
        if region in facts.resident and region not in call.keep:
            yield Action("pause", region=region, nbytes=probe.region_bytes(region))


def _pause_resumed(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    for region in reversed(_PAUSED):
        if region in facts.resident and region not in call.before.resident:
            yield Action("pause", region=region, nbytes=probe.region_bytes(region))


def _resume(regions: tuple[Region, ...]) -> Work:
    def work(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
        for region in regions:
            if region not in facts.resident:
                yield Action("resume", region=region, nbytes=probe.region_bytes(region))

    return work


def _collect(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """Objects in cycles hold memory only where something was or will be dropped; looking for them takes long."""
    if probe.dropped() or any(drop(facts, call, probe) for drop in (_drop_workspaces, _discard_grads)):
        yield Action("collect_garbage")
    yield Action("collect")


def _copy_in(
    facts: Facts,
    slots: Iterable[Slot],
    parts: Mapping[Slot, int],
    tag: str | None,
    late: bool = False,
    streamed: bool = False,
) -> Iterator[Action]:
    for slot in slots:
        part = facts.parts[parts[slot]]
        if part.id not in facts.copies:
            version = facts.tags.get(tag or ACTOR, 0)
            raise NoReadableCopy(tag or slot.value, version, {slot.value: ()}, "recover() keeps what is left.")
        yield Action("copy_in", slot, part.id, tag=tag, nbytes=part.nbytes, direction=IN, late=late, streamed=streamed)


def _restore_backup(slot: Slot, may_be_late: bool = False) -> Work:
    def work(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
        if slot not in facts.backups or facts.device.get(slot) == facts.backups[slot]:
            return ()
        return _copy_in(facts, [slot], facts.backups, None, may_be_late and _comes_later(call, probe))

    return work


def _comes_later(call: Call, probe: Probe) -> bool:
    """Whether the event ends before the bytes are there; other events look at what came before they end."""
    return call.event in ("wake_up", "switch") and (probe.stream_ordered() or call.stream)


def _restore_weights(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    version = target_version(facts, call)
    tag = call.shown if call.event in ("finish_load", "abort_load") else call.tag or ACTOR
    parts, stale = facts.versions[version].parts, stale_slots(facts, version)
    streamed = call.stream and bool(stale) and probe.can_stream()
    yield from _copy_in(facts, stale, parts, tag, _comes_later(call, probe), streamed)
    if streamed:
        yield Action("start_stream")


def _await(slots: Iterable[Slot]) -> Work:
    def work(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
        for slot in slots:
            if slot in facts.arriving:
                yield Action("arrive", slot, facts.arriving[slot])

    return work


def _read_back(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    if facts.arriving:
        yield Action("land")
    yield Action("read_back")


def _restore_shown(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """What the state showed, from its copies, in the regions it had; nothing where it showed nothing."""
    yield from _put_together(facts, call, probe)
    halves = dict.fromkeys(facts.halves.values(), Copy.HOST)
    facts = evolve(facts, copies={**facts.copies, **halves})  # then
    if call.shown is None or Region.WEIGHTS not in facts.resident:
        return
    version = facts.tags[call.shown]
    yield from _copy_in(facts, stale_slots(facts, version), facts.versions[version].parts, call.shown)
    for slot in facts.backups:
        if SLOT_REGION[slot] in facts.resident & call.before.resident:
            yield from _restore_backup(slot)(facts, call, probe)


def _restore_actor(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    version = facts.tags[ACTOR]
    return _copy_in(facts, stale_slots(facts, version), facts.versions[version].parts, ACTOR)


def _zero_grads(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("zero_grads", region=Region.GRADS),) if facts.grads_discarded and not call.implicit else ()


def _restore_base(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    """After ``settle_phase``: what 'actor' and the optimizer backup point at is what the device should hold."""
    yield from _restore_actor(facts, call, probe)
    yield from _restore_backup(Slot.OPTIMIZER)(facts, call, probe)


def _engines(do: str) -> Work:
    return lambda facts, call, probe: tuple(Action(do, engine=name) for name in call.engines)


def _send(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    nbytes = sum(facts.parts[p].nbytes for p in facts.versions[sync_version(facts, call.tag or ACTOR)].parts.values())
    for name in call.engines:
        yield Action("engine_send", engine=name, nbytes=nbytes)


def _connect(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
    return (Action("connect"),) if call.engines else ()


def _sync_lease(do: str) -> Work:
    def work(facts: Facts, call: Call, probe: Probe) -> Iterable[Action]:
        return (Action(do),) if any(lease.reader == "sync" for lease in facts.leases) else ()

    return work


def _rotate(facts: Facts, call: Call, probe: Probe) -> Iterator[Action]:
    if call.rotate:
        yield Action("rotate")


WORK: dict[str, Work] = {
    "settle_writers": _always("settle"),
    "check_structure": _always("check"),
    "verify_weights": _verify,
    "check_copies": _always("check_copies"),
    "copy_out_weights": _copy_out,
    "adopt_optimizer_state": _adopt_optimizer,
    "back_up_regions": _back_up,
    "agree": lambda facts, call, probe: (),  # one rank has nobody to agree with
    "drop_workspaces": _drop_workspaces,
    "discard_grads": _discard_grads,
    "collect_memory": _collect,
    "suspend_groups": _suspend_groups,
    "pause_regions": _pause,
    "resume_actor_regions": _resume((Region.WEIGHTS, Region.REST, Region.OPTIMIZER)),
    "resume_forward_regions": _resume((Region.WEIGHTS, Region.REST)),
    "pause_resumed": _pause_resumed,
    "reload_groups": _reload_groups,
    "restore_rest": _restore_backup(Slot.REST),
    "restore_optimizer": _restore_backup(Slot.OPTIMIZER, may_be_late=True),
    "exchange_weights": _exchange,
    "restore_weights": _restore_weights,
    "await_weights": _await(VERSION_SLOTS),
    "await_optimizer": _await([Slot.OPTIMIZER]),
    "restore_shown": _restore_shown,
    "open_phase": _always("open_phase"),
    "zero_grads": _zero_grads,
    "freeze_version": _always("freeze_phase"),
    "settle_phase": _always("settle_phase"),
    "restore_base": _restore_base,
    "restore_actor": _restore_actor,
    "open_load": _always("open_load"),
    "freeze_load": _always("freeze_load"),
    "reopen_load": _reopen_load,
    "copy_out_loaded": _copy_out_loaded,
    "drop_load": _always("drop_load"),
    "adopt_weights": _always("adopt"),
    "move_tag": _always("move_tag"),
    "raise_sync_groups": _raise_sync_groups,
    "lower_sync_groups": _lower_sync_groups,
    "connect_engines": _connect,
    "lease_source": _always("lease"),
    "release_source": _sync_lease("release_lease"),
    "pause_generation": _engines("engine_pause"),
    "continue_untouched": _engines("engine_continue_untouched"),
    "flush_caches": _engines("engine_flush"),
    "send_weights": _send,
    "abort_updates": _engines("engine_abort"),
    "check_engines": _engines("engine_check"),
    "end_updates": _engines("engine_end"),
    "publish_version": _always("publish"),
    "withdraw_version": _always("withdraw"),
    "rotate_tags": _rotate,
    "rotate_back": _always("rotate_back"),
    "continue_generation": _engines("engine_continue"),
    "abandon_sync": _sync_lease("release_lease"),
    "read_back": _read_back,
    "close_open_business": _always("close_business"),
    "copy_out_survivors": _copy_out_survivors,
    "copy_out_everything": _copy_out_everything,
    "bring_back": _always("bring_back"),
    "remove_hooks": _always("remove_hooks"),
    "free_copies": _always("free_copies"),
}


def actions(effect: Effect, facts: Facts, call: Call, probe: Probe) -> tuple[Action, ...]:
    """What the effect has to do now."""
    work = WORK.get(effect.name)
    return _own_work(effect, facts) if work is None else tuple(work(facts, call, probe))


def own_facts(facts: Iterable[AnyFact]) -> frozenset[AnyFact]:
    """Those that are a machine's own."""
    return frozenset(fact for fact in facts if not isinstance(fact, Fact))


def _own_work(effect: Effect, facts: Facts) -> tuple[Action, ...]:
    """Nothing where all own facts that the effect gives and takes are surely as it would leave them."""
    gives, takes = own_facts(effect.gives), own_facts(effect.takes)
    changes = gives | takes
    if changes and gives <= facts.own and takes.isdisjoint(facts.own) and changes.isdisjoint(facts.own_doubted):
        return ()
    return (Action(effect.name, own=effect),)
