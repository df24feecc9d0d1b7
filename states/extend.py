"""Making a machine out of another one: what is added, what is replaced, and where effects are put into its rows.

Everything is said in one call and checked at its end, because what one addition breaks another one mends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from attrs import evolve, field, frozen

from states.resources import AnyFact
from states.spec import Advice, DefinitionError, Effect, Event, Guard, MachineSpec, Row, State, Use

Item = State | Event | Effect | Guard | Row | Use | Advice
_Kind = TypeVar("_Kind", State, Event, Effect, Guard, Row, Use, Advice)


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@frozen
class Insert:
    """Put an effect into every row of the event, or events, right before or right after another one; else at the end.

    Only rows that have the neighbour are changed; ``source`` and ``target`` narrow them down further.
    """

    effect: str
    events: tuple[str, ...] = field(converter=_names)
    before: str | None = None
    after: str | None = None
    source: str | None = None
    target: str | None = None

    def fits(self, row: Row) -> bool:
        neighbour = self.before or self.after
        return (
            row.event in self.events
            and self.source in (None, row.source)
            and self.target in (None, row.target)
            and (neighbour is None or neighbour in row.effects)
        )

    def into(self, row: Row) -> Row:
        place = len(row.effects)
        if self.before is not None:
            place = row.effects.index(self.before)
        elif self.after is not None:
            place = row.effects.index(self.after) + 1
        return evolve(row, effects=(*row.effects[:place], self.effect, *row.effects[place:]))


def extended(
    spec: MachineSpec,
    name: str,
    *,
    states: Iterable[State] = (),
    events: Iterable[Event] = (),
    effects: Iterable[Effect] = (),
    guards: Iterable[Guard] = (),
    rows: Iterable[Row] = (),
    uses: Iterable[Use] = (),
    advice: Iterable[Advice] = (),
    replace: Iterable[Item] = (),
    insert: Iterable[Insert] = (),
    lacking: Mapping[AnyFact, Iterable[str]] | None = None,
    allow: Mapping[str, Iterable[str]] | None = None,
) -> MachineSpec:
    """A new machine: ``spec`` with these changes, checked as a whole. Raises DefinitionError with every finding.

    ``replace`` has items that take the place of those with the same name (a row's is its event, source, match and
    conditions). ``insert`` puts effects into rows of ``spec``. ``lacking`` maps a fact to states of ``spec`` in which
    it must be false from now on, ``allow`` an operation to further states that allow it.
    """
    replace, insert = tuple(replace), tuple(insert)
    states, events, rows = tuple(states), tuple(events), tuple(rows)
    lacks, allow = _by_state(lacking or {}), allow or {}
    found = [*_unknown_replacements(spec, replace), *_unknown_places(spec, insert, lacks, allow)]
    if found:
        raise DefinitionError(name, found)
    return evolve(
        spec,
        name=name,
        states=(*(_lacking(state, lacks) for state in _with(spec.states, replace)), *states),
        events=(*_with(spec.events, replace), *events),
        effects=(*_with(spec.effects, replace), *effects),
        guards=(*_with(spec.guards, replace), *guards),
        rows=(*(_inserted(row, insert) for row in _with(spec.rows, replace)), *rows),
        uses=(*(_allowing(use, allow) for use in _with(spec.uses, replace)), *uses),
        advice=(*_with(spec.advice, replace), *advice),
        refused=_refused(spec, states, events, rows),
    )


def _refused(
    spec: MachineSpec, states: tuple[State, ...], events: tuple[Event, ...], rows: tuple[Row, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What is new is refused unless a row answers it, and what a new row answers is refused no more."""
    if not spec.refused:
        return ()
    answered = {(row.source, row.event) for row in rows}
    known, new = {state.name for state in spec.states}, {event.name for event in events}
    every = [*(event.name for event in spec.events), *(event.name for event in events)]
    listed = {}
    for state in (*known, *(state.name for state in states)):
        refused = {*spec.refused_in(state), *new} if state in known else set(every)
        listed[state] = tuple(event for event in every if event in refused and (state, event) not in answered)
    return tuple(listed.items())


def _by_state(lacking: Mapping[AnyFact, Iterable[str]]) -> dict[str, set[AnyFact]]:
    lacks: dict[str, set[AnyFact]] = {}
    for fact, states in lacking.items():
        for state in _names(states):
            lacks.setdefault(state, set()).add(fact)
    return lacks


def _key(item: Item) -> tuple[str, Hashable]:
    """What kind of item it is, and which one."""
    match item:
        case Row():
            return "row", (item.event, item.source, item.match.value, item.when, item.unless)
        case Use():
            return "use", item.operation
        case Advice():
            return "advice", (item.event, item.state)
    return type(item).__name__.lower(), item.name


def _with(items: Iterable[_Kind], replace: Iterable[Item]) -> Iterator[_Kind]:
    by_key = {_key(item): item for item in replace}
    for item in items:
        found = by_key.get(_key(item), item)
        assert isinstance(found, type(item))  # the kind is part of the key
        yield found


def _inserted(row: Row, inserts: Iterable[Insert]) -> Row:
    for insert in inserts:
        if insert.fits(row):
            row = insert.into(row)
    return row


def _lacking(state: State, lacks: Mapping[str, Iterable[AnyFact]]) -> State:
    return evolve(state, lacks=state.lacks | frozenset(lacks.get(state.name, ())))


def _allowing(use: Use, allow: Mapping[str, Iterable[str]]) -> Use:
    return evolve(use, states=(*use.states, *_names(allow.get(use.operation, ()))))


def _unknown_replacements(spec: MachineSpec, replace: Iterable[Item]) -> Iterator[str]:
    known = {_key(item) for kind in (spec.states, spec.events, spec.effects, spec.guards, spec.rows) for item in kind}
    known |= {_key(item) for item in spec.uses} | {_key(item) for item in spec.advice}
    for item in replace:
        if _key(item) not in known:
            kind, name = _key(item)
            shown = f"{item.event} from {item.source} ({item.match} tag)" if isinstance(item, Row) else f"{name!r}"
            yield f"replace: machine {spec.name!r} has no {kind} {shown}"


def _unknown_places(
    spec: MachineSpec, insert: Iterable[Insert], lacks: Iterable[str], allow: Iterable[str]
) -> Iterator[str]:
    for one in insert:
        if one.before is not None and one.after is not None:
            yield f"insert {one.effect}: say before or after, not both"
        for event in one.events:
            if not any(evolve(one, events=(event,)).fits(row) for row in spec.rows):
                yield f"insert {one.effect}: machine {spec.name!r} has no such row of {event!r}"
    for state in lacks:
        if all(state != known.name for known in spec.states):
            yield f"lacking: machine {spec.name!r} has no state {state!r}"
    for operation in allow:
        if all(operation != use.operation for use in spec.uses):
            yield f"allow: machine {spec.name!r} has no use {operation!r}"
