"""What can be wrong with a declaration. Every check returns findings; none stops at the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import product

from states.coverage import unanswered
from states.resources import CONDITIONS, PROGRESS, AnyFact, Fact
from states.spec import ORIGIN, SAME, Effect, Guard, MachineSpec, Match, Row, State, facts_used, fold


def problems(spec: MachineSpec) -> list[str]:
    """Every finding, names before rows, rows before graph: later checks run only on names that resolve."""
    if found := list(_bad_own_facts(spec)):
        return found
    found = [*_duplicates(spec), *_unknown_names(spec), *_bad_facts(spec), *_bad_shows(spec)]
    if found:
        return found
    return [
        *_bad_rows(spec),
        *_without_way_out(spec),
        *_half_undone(spec),
        *_asked_in_vain(spec),
        *_unreachable(spec),
        *_trapped(spec),
        *_broken_contracts(spec),
        *unanswered(spec),
    ]


def _duplicates(spec: MachineSpec) -> Iterator[str]:
    kinds = {
        "state": [s.name for s in spec.states],
        "event": [e.name for e in spec.events],
        "effect": [e.name for e in spec.effects],
        "guard": [g.name for g in spec.guards],
    }
    for kind, names in kinds.items():
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{kind} {name!r} is declared {count} times"
    keys = Counter((r.event, r.source, r.match, r.when, r.unless) for r in spec.rows)
    for (event, source, match, *_), count in keys.items():
        if count > 1:
            yield f"row {event} from {source} ({match} tag) is declared {count} times"


def _unknown_names(spec: MachineSpec) -> Iterator[str]:
    states = {s.name for s in spec.states}
    events = {e.name for e in spec.events}
    effects = {e.name for e in spec.effects}
    guards = {g.name for g in spec.guards}
    if spec.initial not in states:
        yield f"initial state {spec.initial!r} is not declared"
    for row in spec.rows:
        where = describe(row)
        yield from _missing(where, "event", [row.event], events)
        yield from _missing(where, "source", [row.source], states)
        yield from _missing(where, "target", [row.target], states | {SAME, ORIGIN})
        yield from _missing(where, "effect", row.effects, effects)
        yield from _missing(where, "guard", row.guards, guards)
    for effect in spec.effects:
        yield from _missing(f"effect {effect.name}", "inverse", [effect.inverse] if effect.inverse else [], effects)
    for guard in spec.guards:
        yield from _missing(f"guard {guard.name}", "first event", [guard.first] if guard.first else [], events)
    for use in spec.uses:
        yield from _missing(f"use {use.operation}", "state", use.states, states)
    for advice in spec.advice:
        yield from _missing(f"advice on {advice.event}", "event", [advice.event], events)
        yield from _missing(f"advice on {advice.event}", "state", [advice.state], states)


def _missing(where: str, kind: str, names: Iterable[str], known: set[str]) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{where}: unknown {kind} {name!r}"


def _bad_own_facts(spec: MachineSpec) -> Iterator[str]:
    """Facts are compared as text, so a machine's own must differ from every other enum's in value and in name."""
    used = [fact for facts in facts_used(spec) for fact in facts]
    for text in dict.fromkeys(str(fact) for fact in used if not isinstance(fact, StrEnum)):
        yield f"fact {text!r} is no member of a StrEnum"
    enums = list(dict.fromkeys(type(fact) for fact in used if isinstance(fact, StrEnum) and not isinstance(fact, Fact)))
    for number, kind in enumerate(enums):
        others: list[type[StrEnum]] = [Fact, *enums[:number]]
        for fact, other in product(kind, others):
            if fact.name in other.__members__:
                yield f"fact {kind.__name__}.{fact.name} has the name of {other.__name__}.{fact.name}"
            for same in (one for one in other if one.value == fact.value):
                yield f"fact {kind.__name__}.{fact.name} has the text of {other.__name__}.{same.name}"


def _bad_shows(spec: MachineSpec) -> Iterator[str]:
    for state in spec.states:
        derived = state.per_tag or state.per_origin
        if state.shows is not None and derived:
            yield f"state {state.name} shows {state.shows!r}, though what it shows follows from its tag or origin"
        if Fact.VERSION_SHOWN in state.holds and state.shows is None and not derived:
            yield f"state {state.name} holds {Fact.VERSION_SHOWN.name} but does not say which tag it shows"


def _bad_facts(spec: MachineSpec) -> Iterator[str]:
    for state in spec.states:
        for fact in sorted(state.holds & state.lacks):
            yield f"state {state.name} both holds and lacks {fact.name}"
        for fact in sorted((state.holds | state.lacks) & (CONDITIONS | PROGRESS)):
            yield f"state {state.name} is declared over {fact.name}, which is of one event"
    for effect in spec.effects:
        for fact in sorted((effect.needs & effect.forbids) | (effect.gives & effect.takes)):
            yield f"effect {effect.name} contradicts itself about {fact.name}"
        for fact in sorted((effect.needs | effect.forbids | effect.gives | effect.takes) & CONDITIONS):
            yield f"effect {effect.name} is declared over {fact.name}, a condition of one call"


def _bad_rows(spec: MachineSpec) -> Iterator[str]:
    # a state that promises nothing takes in any row, so it is for faults alone
    promising = {state.name for state in spec.states if state.holds or state.lacks}
    faults = {row.target for row in spec.rows if row.event == "fault"} - {SAME, ORIGIN} - promising
    for row in spec.rows:
        if spec.state(row.source).final and row.target != SAME:
            yield f"{describe(row)}: leaves a final state"
        if row.target == ORIGIN and not spec.state(row.source).per_origin:
            yield f"{describe(row)}: {row.source} does not remember an origin"
        if row.target not in (SAME, ORIGIN) and spec.state(row.target).per_tag and row.match is not Match.OTHER:
            yield f"{describe(row)}: {row.target} needs a tag other than 'actor'"
        if row.event != "fault" and row.target in faults - {row.source}:
            yield f"{describe(row)}: only a fault leads to {row.target}"
        yield from _bad_order(spec, row)


def _bad_order(spec: MachineSpec, row: Row) -> Iterator[str]:
    """Undoable effects before ``agree``; nothing that can only refuse after a fatal effect."""
    if spec.agree in row.effects:
        for name in row.effects[: row.effects.index(spec.agree)]:
            if not spec.effect(name).undoable:
                yield f"{describe(row)}: {name} can not be undone, so it must come after {spec.agree}"
        for name in row.effects[row.effects.index(spec.agree) :]:
            if spec.effect(name).refuses:
                yield f"{describe(row)}: {name} may refuse, so it must come before {spec.agree}"
    for name, count in Counter(row.effects).items():
        if count > 1:
            yield f"{describe(row)}: effect {name} stands {count} times"


def _without_way_out(spec: MachineSpec) -> Iterator[str]:
    """An effect may fail in any state and its owner may leave in any state: a machine that knows these says how."""
    declared = {event.name for event in spec.events}
    for event in (name for name in ("fault", "close") if name in declared):
        answered = {row.source for row in spec.rows if row.event == event}
        for state in spec.states:
            if not state.final and state.name not in answered:
                yield f"state {state.name} has no row for {event!r}"


def _half_undone(spec: MachineSpec) -> Iterator[str]:
    """What an inverse leaves of a machine's own facts nobody can look at, so it must declare that it undoes all."""
    own = set(spec.own_facts)
    for effect in (e for e in spec.effects if e.inverse is not None):
        inverse = spec.effect(effect.inverse or "")
        for fact in sorted((effect.gives & own) - inverse.takes):
            yield f"effect {effect.name} gives {fact.name}, which its inverse {inverse.name} does not take"
        for fact in sorted((effect.takes & own) - inverse.gives):
            yield f"effect {effect.name} takes {fact.name}, which its inverse {inverse.name} does not give"


def _asked_in_vain(spec: MachineSpec) -> Iterator[str]:
    """What a guard asks for first must make it say yes, and be possible wherever it may say no."""
    firsts = {guard.name: guard for guard in spec.guards if guard.first is not None}
    events = {event.name: event for event in spec.events}
    for guard in firsts.values():
        event = events[guard.first or ""]
        for fact in sorted(guard.requires - event.gives):
            yield f"guard {guard.name} asks for {event.name} first, which does not promise {fact.name}"
        for fact in sorted(guard.forbids - event.takes):
            yield f"guard {guard.name} asks for {event.name} first, which does not promise that {fact.name} ends"
    answered = {(row.event, row.source) for row in spec.rows}
    for row in spec.rows:
        for guard in (firsts[name] for name in row.guards if name in firsts):
            if (guard.first, row.source) not in answered and not _says_yes(spec, guard, spec.state(row.source)):
                where = f"{describe(row)}: guard {guard.name}"
                yield f"{where} asks for {guard.first} first, which {row.source} has no row for"


def _says_yes(spec: MachineSpec, guard: Guard, state: State) -> bool:
    """Whether it can say nothing else in this state, by the state's contract."""
    wanted: dict[AnyFact, bool] = dict.fromkeys(guard.requires, True) | dict.fromkeys(guard.forbids, False)
    return all(wanted.items() <= facts.items() for _, facts in _contracts(spec, state))


def _targets(spec: MachineSpec, row: Row) -> set[str]:
    if row.target == SAME:
        return {row.source}
    if row.target == ORIGIN:
        return {r.source for r in spec.rows if r.target == row.source}
    return {row.target}


def _reachable(spec: MachineSpec, start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        source = todo.pop()
        for row in spec.rows_from(source):
            fresh = _targets(spec, row) - seen
            seen |= fresh
            todo += fresh
    return seen


def _unreachable(spec: MachineSpec) -> Iterator[str]:
    reached = _reachable(spec, spec.initial)
    for state in spec.states:
        if state.name not in reached:
            yield f"state {state.name} can not be reached from {spec.initial}"


def _trapped(spec: MachineSpec) -> Iterator[str]:
    ways_out = {s.name for s in spec.states if s.final} | {spec.initial}
    for state in spec.states:
        if not _reachable(spec, state.name) & ways_out:
            yield f"state {state.name} leads neither to {spec.initial} nor to a final state"


def known_at(spec: MachineSpec, row: Row) -> Iterator[tuple[str, dict[AnyFact, bool]]]:
    """What is known when the row's effects start (contract, choice, guards), with the origin it is known for."""
    for origin, facts in _contracts(spec, spec.state(row.source)):
        known: dict[AnyFact, bool] = dict(facts)
        known |= dict.fromkeys(PROGRESS, False)
        known |= dict.fromkeys(row.when - CONDITIONS, True) | dict.fromkeys(row.unless - CONDITIONS, False)
        for guard in (spec.guard(name) for name in row.guards):
            known |= dict.fromkeys(guard.requires - CONDITIONS, True) | dict.fromkeys(guard.forbids - CONDITIONS, False)
        yield origin, known


def _contracts(spec: MachineSpec, state: State) -> Iterator[tuple[str, dict[AnyFact, bool]]]:
    """The state's contract; for a per-origin state, what each way in leaves known."""
    own = dict.fromkeys(state.holds, True) | dict.fromkeys(state.lacks, False)
    if not state.per_origin:
        yield state.name, own
        return
    for row in (r for r in spec.rows if r.target == state.name):
        for origin, known in known_at(spec, row):
            for effect in (spec.effect(name) for name in row.effects):
                known = fold(known, effect)
            yield origin, {**{fact: value for fact, value in known.items() if fact not in PROGRESS}, **own}


def _broken_contracts(spec: MachineSpec) -> Iterator[str]:
    for row in spec.rows:
        for origin, known in known_at(spec, row):
            yield from _walk(spec, row, origin, known)


def _walk(spec: MachineSpec, row: Row, origin: str, known: dict[AnyFact, bool]) -> Iterator[str]:
    for effect in (spec.effect(name) for name in row.effects):
        yield from _unmet(row, effect, known)
        known = fold(known, effect)
    target = spec.state({SAME: row.source, ORIGIN: origin}.get(row.target, row.target))
    for fact in sorted(f for f in target.holds if known.get(f) is not True):
        yield f"{describe(row)}: {target.name} must hold {fact.name}, which nothing here makes true"
    for fact in sorted(f for f in target.lacks if known.get(f) is not False):
        yield f"{describe(row)}: {target.name} must lack {fact.name}, which nothing here makes false"
    yield from _broken_promises(spec, row, known)


def _broken_promises(spec: MachineSpec, row: Row, known: dict[AnyFact, bool]) -> Iterator[str]:
    """What the event promises, apart from the state it leads to."""
    if spec.state(row.source).final:
        return
    event = next(event for event in spec.events if event.name == row.event)
    for fact in sorted(f for f in event.gives if known.get(f) is not True):
        yield f"{describe(row)}: {row.event} promises {fact.name}, which nothing here makes true"
    for fact in sorted(f for f in event.takes if known.get(f) is not False):
        yield f"{describe(row)}: {row.event} promises that {fact.name} ends, which nothing here does"


def _unmet(row: Row, effect: Effect, known: dict[AnyFact, bool]) -> Iterator[str]:
    for fact in sorted(f for f in effect.needs if known.get(f) is not True):
        yield f"{describe(row)}: effect {effect.name} needs {fact.name}, which is not known to be true there"
    for fact in sorted(f for f in effect.forbids if known.get(f) is not False):
        yield f"{describe(row)}: effect {effect.name} forbids {fact.name}, which is not known to be false there"


def describe(row: Row) -> str:
    tag = "" if row.match is Match.NONE else f"({row.match})"
    return f"row {row.event}{tag} {row.source} -> {row.target}"
