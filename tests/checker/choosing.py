"""What is left to the trainer, the framework and the memory that is left when an event comes: every possibility.

[Note: choices] The run time decides by what it measures. So an event is run once for each thing that there may be to
measure: nothing was written since, the trained weights were, all were; the optimizer has stepped or not, and has new
state or not. After a fault memory may hold the bytes of something known where the facts claim nothing.

Not tried, since the checker leaves it out: a phase that writes frozen weights, a load or adoption whose bytes equal
those of a tag that was not shown, adopted changes of frozen weights, optimizer state that appears in a phase which a
recovery had already measured, and host copies that were spoiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, combinations, product

from attrs import evolve, frozen
from things import MAPPED, EngineThing, Pair, fresh

from lifecycle.versions import Facts
from states.resources import SLOT_REGION, VERSION_SLOTS, Slot

_BACKUP = "backup"
_ALL = frozenset(("weights", "optimizer", "rest", "groups"))


@frozen
class Choice:
    """What the trainer, the framework and the memory that is left make of an event."""

    weights: str = "same"  # what was written since: nothing new, new trained weights, all new
    steps: int = 0  # of the optimizer, in the open phase
    appeared: bool = False  # optimizer state that the backend does not own
    grads_back: bool = False  # gradients that a sleep discarded
    found: tuple[tuple[Slot, str | None], ...] = ()  # whose bytes memory holds of which the facts know nothing
    brought: frozenset[str] = _ALL  # what a close still manages to map


def _weights(pair: Pair) -> list[Slot]:
    return [slot for slot in VERSION_SLOTS if slot in pair.things.contents]


def choices(effects: Collection[str], pair: Pair) -> Iterator[Choice]:
    """Everything that may be so when the event comes, and that makes a difference to it."""
    names, facts = set(effects), pair.facts
    written = ["same"]
    ends_phase = facts.phase is not None and names & {"freeze_version", "settle_phase", "close_open_business"}
    if ends_phase or "adopt_weights" in names:
        written = ["same", "trained"]
    if facts.load is not None and "freeze_load" in names:
        written = ["same", "trained", "new"] if len(_weights(pair)) > 1 else ["same", "trained"]
    unmeasured = facts.parts[facts.backups[Slot.OPTIMIZER]].fingerprint is None
    steps = [0, 1] if facts.phase is not None and names & {"settle_phase", "read_back"} and unmeasured else [0]
    valid = facts.backups[Slot.OPTIMIZER] == facts.device.get(Slot.OPTIMIZER)
    appears = names & {"adopt_optimizer_state", "read_back"} and valid
    if "read_back" in names and facts.phase is not None:
        appears = facts.backups[Slot.OPTIMIZER] not in facts.copies
    appeared = [False, True] if appears else [False]
    back = [False, True] if "zero_grads" in names else [False]
    found = list(_found(pair)) if "read_back" in names else [()]
    for values in product(written, steps, appeared, back, found):
        yield Choice(*values)


def lacking(pair: Pair) -> list[str]:
    """What a close would have to map or raise again, unless it fails to."""
    down = () if pair.facts.groups_up else ("groups",)
    return [*(region for region in MAPPED if region not in pair.things.mapped), *down]


def parts_of(names: list[str]) -> Iterator[frozenset[str]]:
    """All but the whole."""
    yield from map(frozenset, chain.from_iterable(combinations(names, n) for n in range(len(names))))


def _found(pair: Pair) -> Iterator[tuple[tuple[Slot, str], ...]]:
    """For slots that the facts claim nothing of: bytes that nobody knows, or those of something known."""
    facts, options = pair.facts, []
    for slot in pair.things.contents:
        if slot in facts.backups:
            owners = {facts.backups[slot]: _BACKUP}
        else:
            owners = {facts.versions[version].parts[slot]: tag for tag, version in facts.tags.items()}
        if slot in facts.halves:  # the bytes that went out, those that came in, or some of each: no third ones
            assert facts.halves[slot] in owners
            assert len(owners) == 2
        claimed = facts.device.get(slot) in owners or (facts.phase is not None and slot in VERSION_SLOTS)
        if SLOT_REGION[slot] in pair.things.mapped and not claimed:
            known = [owner for part, owner in owners.items() if _token(facts, part) is not None]
            options.append([(slot, owner) for owner in (None, *known)])
    yield from product(*options)


def resolved(facts: Facts, choice: Choice) -> dict[Slot, str]:
    """Bytes by slot."""
    found = {}
    for slot, owner in choice.found:
        part = None if owner is None else facts.backups.get(slot) or facts.version_of(owner).parts[slot]
        found[slot] = fresh() if part is None else (_token(facts, part) or fresh())
    return found


def written(pair: Pair, choice: Choice) -> dict[Slot, str]:
    """What the weights slots hold when the event comes, where the trainer or a load has been writing."""
    facts = pair.facts
    slots = _weights(pair)
    if facts.phase is not None:
        base = facts.versions[facts.phase.base].parts
    elif facts.load is not None:
        written = facts.versions[facts.load.version].parts  # unless it was measured since, in an event that failed
        base = {s: facts.load.device_before[s] for s in slots if facts.device.get(s) == written[s]}
    else:
        base = {slot: facts.device[slot] for slot in slots if slot in facts.device}
    new = {"same": [], "trained": slots[-1:], "new": slots}[choice.weights]
    same = {slot: token for slot, part in base.items() if (token := _token(facts, part)) is not None}
    return {**same, **{slot: fresh() for slot in new}}


def _token(facts: Facts, part: int) -> str | None:
    found = facts.parts.get(part)
    return None if found is None else found.fingerprint


def chosen(facts: Facts, choice: Choice) -> Facts:
    if choice.grads_back:
        facts = evolve(facts, grads_discarded=True)
    if choice.found:  # what was measured before and belongs to nobody is as good as unknown
        found = dict(choice.found)
        facts = evolve(facts, device={slot: part for slot, part in facts.device.items() if slot not in found})
    if facts.phase is not None and choice.weights != "same":  # as if nobody had measured it yet
        working = facts.versions[facts.phase.version].parts
        facts = evolve(facts, device={slot: working.get(slot, part) for slot, part in facts.device.items()})
    if choice.steps and facts.phase is not None:
        facts = evolve(facts, phase=evolve(facts.phase, steps=choice.steps))
    return facts


def acted(event: str, pair: Pair) -> Pair:
    """What the trainer or an engine does of itself."""
    things, words = pair.things, event.split()
    if words[0] == "engine":
        one = things.engines[words[1]]
        now = EngineThing() if words[2] == "dies" else evolve(one, generating=words[2] == "continues")
        return evolve(pair, things=evolve(things, engines={**things.engines, words[1]: now}))
    rest = fresh() if Slot.REST in pair.facts.device else things.contents[Slot.REST]
    contents = {**things.contents, Slot.REST: rest}
    grads, graphs = things.grads or "backward" in event, things.graphs or event == "capture graphs"
    backward = event == "forward and backward" or (event == "capture graphs" and things.grads)
    grads = things.grads or backward
    return evolve(pair, things=evolve(things, contents=contents, workspaces=True, grads=grads, graphs=graphs))
