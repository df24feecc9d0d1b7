"""From a machine's declaration to what a picture of it shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from attrs import evolve

from lifecycle.render.model import Diagram, DrawnEffect, Edge, Entry, Kind, LegendLine, Node, plain_text
from lifecycle.render.options import Detail
from states.spec import ORIGIN, SAME, MachineSpec, Match, Row, State

MANY = 3  # as many edges of one kind into one state, all beside the way, start at one stub
FAULT = "fault"  # the event of a state that an effect left half-way


def extract(
    spec: MachineSpec, detail: Detail = Detail.EFFECTS, tags: Iterable[str] = (), current: str | None = None
) -> Diagram:
    """The picture of a machine. ``current`` is a state as users read it, ``SWITCHED(ref)``.

    Raises ValueError for a current state that the machine does not have.
    """
    entries = [entry for number, row in enumerate(spec.rows, 1) for entry in _entries(spec, number, row)]
    legend, numbers = _legend(spec, entries, detail)
    entries = [evolve(entry, number=numbers.get(entry.row, 0)) for entry in entries]
    names = tuple(tag for tag in tags if tag != "actor")
    here = None if current is None else base_state(spec, current)
    nodes = tuple(
        _node(spec, state, detail, names, entries, current if state.name == here else None) for state in spec.states
    )
    return Diagram(
        name=plain_text(spec.name),
        title=f"The {plain_text(spec.name)} machine",
        detail=detail,
        initial=spec.initial,
        nodes=nodes,
        edges=_edges(spec, entries),
        legend=legend,
        words=_words(spec, detail),
    )


def base_state(spec: MachineSpec, text: str) -> str:
    """The declared state of one as users read it. Raises ValueError naming the known ones."""
    known = [state.name for state in spec.states]
    for name in (text, text.partition("(")[0]):
        if name in known:
            return name
    raise ValueError(f"machine {spec.name!r} has no state {text!r}; it has: {', '.join(known)}")


def short(fact: StrEnum) -> str:
    """A fact in a word or two."""
    return plain_text(fact.name.lower().replace("_", " "))


def is_own_loop(spec: MachineSpec, entry: Entry) -> bool:
    """Whether the entry leads from one tag's state to another tag's: a loop in the picture, but not the same state."""
    row = spec.rows[entry.row - 1]
    return row.target not in (SAME, ORIGIN) and spec.state(row.target).per_tag


def _entries(spec: MachineSpec, number: int, row: Row) -> list[Entry]:
    if row.target == SAME:
        targets = [row.source]
    elif row.target == ORIGIN:
        targets = origins_of(spec, row.source)
    else:
        targets = [row.target]
    effects = tuple(_effect(spec, name) for name in row.effects)
    conditions = (*map(short, sorted(row.when)), *(f"not {short(fact)}" for fact in sorted(row.unless)))
    return [
        Entry(
            row=number,
            event=plain_text(row.event),
            tag=_tag_words(spec, row),
            conditions=conditions,
            source=row.source,
            target=target,
            kind=_kind(spec, row, target),
            effects=effects,
            guards=tuple(map(plain_text, row.guards)),
        )
        for target in targets
    ]


def origins_of(spec: MachineSpec, state: str) -> list[str]:
    """The states from which this one is entered, in the order of their declaration."""
    entered = {row.source for row in spec.rows if row.target == state and row.source != state}
    return [known.name for known in spec.states if known.name in entered]


def _effect(spec: MachineSpec, name: str) -> DrawnEffect:
    effect = spec.effect(name)
    return DrawnEffect(plain_text(name), name == spec.agree, not effect.undoable, effect.fatal)


def _kind(spec: MachineSpec, row: Row, target: str) -> Kind:
    same = target == row.source and (row.target == SAME or not spec.state(target).per_tag)
    if same and not row.effects:
        return Kind.NOOP
    if row.event == FAULT:
        return Kind.FAULT
    if spec.state(target).final and target != row.source:
        return Kind.CLOSING
    return Kind.NORMAL


def _tag_words(spec: MachineSpec, row: Row) -> str:
    per_tag = spec.state(row.source).per_tag
    words = {
        Match.NONE: "",
        Match.ACTOR: "actor",
        Match.OTHER: "other tag" if per_tag else "tag",
        Match.SHOWN: "same tag" if per_tag else "actor",
    }
    return words[row.match]


def _node(
    spec: MachineSpec,
    state: State,
    detail: Detail,
    tags: tuple[str, ...],
    entries: Sequence[Entry],
    current: str | None,
) -> Node:
    inside = tuple(e for e in entries if e.source == e.target == state.name and not is_own_loop(spec, e))
    contracts = detail is Detail.CONTRACTS
    return Node(
        name=state.name,
        doc=plain_text(state.doc),
        final=state.final,
        fault=any(row.event == FAULT and row.target == state.name for row in spec.rows),
        tags=tuple(map(plain_text, tags)) if state.per_tag else None,
        origins=tuple(origins_of(spec, state.name)) if state.per_origin else None,
        inside=inside,
        holds=_facts(state.holds) if contracts else (),
        lacks=_facts(state.lacks) if contracts else (),
        current=current,
    )


def _facts(facts: Iterable[StrEnum]) -> tuple[str, ...]:
    return tuple(short(fact) for fact in in_order(facts))


def in_order(facts: Iterable[StrEnum]) -> list[StrEnum]:
    """Facts in the order of their declaration."""
    return sorted(facts, key=lambda fact: (type(fact).__name__, list(type(fact).__members__).index(fact.name)))


def _edges(spec: MachineSpec, entries: Sequence[Entry]) -> tuple[Edge, ...]:
    order = {state.name: place for place, state in enumerate(spec.states)}
    found: dict[tuple[int, int, Kind], list[Entry]] = {}
    for entry in entries:
        if entry.source != entry.target or is_own_loop(spec, entry):
            found.setdefault((order[entry.source], order[entry.target], entry.kind), []).append(entry)
    names = [state.name for state in spec.states]
    edges = [
        Edge(names[source], names[target], kind, tuple(group))
        for (source, target, kind), group in sorted(found.items(), key=lambda item: item[0])
    ]
    return tuple(_gathered(edges))


def _gathered(edges: Sequence[Edge]) -> Iterator[Edge]:
    """Edges of one kind that lead aside from many states to one are a single edge from a stub."""
    aside: dict[tuple[str, Kind], list[Edge]] = {}
    for edge in edges:
        if edge.kind in (Kind.FAULT, Kind.CLOSING):
            aside.setdefault((edge.target, edge.kind), []).append(edge)
        else:
            yield edge
    for (target, kind), group in aside.items():
        if len(group) < MANY:
            yield from group
            continue
        entries = tuple(entry for edge in group for entry in edge.entries)
        yield Edge("", target, kind, entries, many=tuple(edge.source for edge in group))


def _key(entry: Entry, detail: Detail) -> tuple[object, ...] | None:
    """What rows under one number share, or None for a row that needs no line in the legend."""
    told = {Detail.STATES: (), Detail.EFFECTS: entry.effects, Detail.CONTRACTS: entry.guards}[detail]
    if not told:
        return None
    return (entry.event, told) if detail is Detail.EFFECTS else (told,)


def _legend(
    spec: MachineSpec, entries: Sequence[Entry], detail: Detail
) -> tuple[tuple[LegendLine, ...], dict[int, int]]:
    """The numbered lines, and the number of each row that has one."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        if key := _key(entry, detail):
            groups.setdefault(key, []).append(entry)
    numbered = list(enumerate(groups.values(), 1))
    lines = tuple(
        LegendLine(
            number,
            tuple(dict.fromkeys(entry.call if detail is Detail.EFFECTS else entry.event for entry in group)),
            _shared_conditions(group) if detail is Detail.EFFECTS else (),
            tuple(dict.fromkeys((e.source, _way(spec, e)) for e in group)),
            group[0].effects,
            group[0].guards,
        )
        for number, group in numbered
    )
    return lines, {entry.row: number for number, group in numbered for entry in group}


def _shared_conditions(group: Sequence[Entry]) -> tuple[str, ...]:
    return group[0].conditions if len({entry.conditions for entry in group}) == 1 else ()


def _way(spec: MachineSpec, entry: Entry) -> str:
    return "its origin" if spec.rows[entry.row - 1].target == ORIGIN else entry.target


def _words(spec: MachineSpec, detail: Detail) -> tuple[tuple[str, str], ...]:
    """The facts that this picture names by a word or two, each with what it says."""
    named: set[StrEnum] = {fact for row in spec.rows for fact in (*row.when, *row.unless)}
    if detail is Detail.CONTRACTS:
        named |= {fact for state in spec.states for fact in (*state.holds, *state.lacks)}
    facts = tuple((short(fact), plain_text(str(fact))) for fact in in_order(named))
    if detail is not Detail.CONTRACTS:
        return facts
    facts = tuple((name, said) for name, said in facts if not _says_itself(name, said))
    asked = {name for row in spec.rows for name in row.guards}
    guards = ((g.name, f"not if {g.reason}") for g in spec.guards if g.name in asked)
    return (*facts, *((plain_text(name), plain_text(text)) for name, text in guards))


def _says_itself(name: str, said: str) -> bool:
    """Whether a fact's short name, such as "hooks" for "hooks installed", needs no explanation."""
    return said.startswith(f"{name} ") and len(said.split()) == len(name.split()) + 1
