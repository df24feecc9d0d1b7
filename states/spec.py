"""The types a machine is declared with, and what makes a declaration wrong.

Theory of operation. A machine is a value: states with contracts (facts that hold, facts that are lacking, all others
unknown), effects (facts needed and forbidden before, given and taken after), guards (facts required or forbidden when
an event is asked for) and rows (event, source, target, guards, effects in order). ``MachineSpec`` folds the effects of
every row over what its source's contract and its guards make known, and the result must satisfy the target's
contract. All findings are collected and raised together. The runtime, the diagrams and the tests derive from this
value; it never acts and imports nothing that could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from attrs import field, frozen

from states.resources import AnyFact, Fact

SAME = "<same>"  # target of a row: the state it started from
ORIGIN = "<origin>"  # target of a row out of a per-origin state: where that state was entered from


class Match(StrEnum):
    """Which tag a row is for."""

    NONE = "none"  # the event's tag, if any, does not choose the row
    ACTOR = "actor"  # the tag is "actor"
    OTHER = "other"  # any other declared tag
    SHOWN = "shown"  # the tag the source state shows


class DefinitionError(ValueError):
    """A machine is declared wrongly. ``problems`` lists every finding."""

    def __init__(self, machine: str, problems: Iterable[str]) -> None:
        self.machine, self.problems = machine, tuple(problems)
        super().__init__(f"machine {machine!r} is declared wrongly:\n" + "\n".join(f"- {p}" for p in self.problems))


def _facts(values: Iterable[AnyFact]) -> frozenset[AnyFact]:
    # of two with one text a set keeps the first: one's own, so that the checks see that it collides
    return frozenset(sorted(values, key=lambda fact: isinstance(fact, Fact)))


@frozen
class State:
    """A condition the actor rests in, as a contract over facts."""

    name: str
    doc: str
    holds: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    lacks: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    per_tag: bool = False  # expanded into one flat state per tag other than "actor"
    per_origin: bool = False  # expanded into one flat state per state it is entered from
    final: bool = False
    shows: str | None = None  # the tag whose version the device shows; a per-tag state shows its own


@frozen
class Event:
    """Something a caller asks for. ``internal`` events are fired by the controller itself.

    ``gives`` and ``takes``: facts that are true, or false, whenever it has ended well. In a final state nothing is left
    to promise.
    """

    name: str
    doc: str
    internal: bool = False
    gives: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    takes: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    any_tag: bool = False  # a state that answers it for some tags must answer it for the others too


@frozen
class Effect:
    """One step of a row. ``inverse`` names the effect that undoes it, also when it stopped half-way.

    ``harmless``: leaves nothing to undo. ``fatal``: its failure may end the process, so everything that can refuse must
    come before it. An effect that is neither harmless nor has an inverse is a point of no return. ``refuses``: it looks
    or copies and may well say no, so where ranks agree it comes before that.
    """

    name: str
    doc: str
    needs: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    forbids: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    gives: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    takes: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    inverse: str | None = None
    harmless: bool = False
    fatal: bool = False
    refuses: bool = False

    @property
    def undoable(self) -> bool:
        return self.harmless or self.inverse is not None


@frozen
class Guard:
    """Facts that must be true or false for a row to be taken, with the words of the refusal.

    ``first``: an internal event that makes it say yes; the controller asks for it instead of refusing.
    """

    name: str
    reason: str
    advice: str
    requires: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    forbids: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    first: str | None = None


@frozen
class Row:
    """From ``source``, ``event`` leads to ``target``, if the guards agree, through the effects in this order."""

    event: str
    source: str
    target: str
    effects: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    match: Match = Match.NONE
    when: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)  # chooses between rows of one event
    unless: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)


@frozen
class Use:
    """An operation of the training framework, the states that allow it and the facts it needs there.

    ``or_when`` facts allow it in any state in which its needs are met.
    """

    operation: str
    states: tuple[str, ...]
    reason: str
    advice: str
    needs: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    forbids: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)
    or_when: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)


@frozen
class Advice:
    """What to tell who asks for an event in a state that has no row for it."""

    event: str
    state: str
    text: str


@frozen
class FlatRow:
    """A row for one flat state and one tag: what the running machine has as a transition."""

    trigger: str
    tag: str | None
    source: str
    target: str
    row: Row
    effects: tuple[Effect, ...]
    guards: tuple[Guard, ...]


@frozen(repr=False)
class MachineSpec:
    """A whole declaration, checked when it is built. Raises DefinitionError with every finding."""

    name: str
    initial: str
    states: tuple[State, ...]
    events: tuple[Event, ...]
    effects: tuple[Effect, ...]
    guards: tuple[Guard, ...]
    rows: tuple[Row, ...]
    uses: tuple[Use, ...] = ()
    advice: tuple[Advice, ...] = ()
    agree: str = "agree"  # the effect that separates what can be undone from what can not
    #: State and the events that are refused there. A machine that lists any must answer or refuse every event.
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __attrs_post_init__(self) -> None:
        from states.checks import problems  # the checks are about this type, so they import it

        if found := problems(self):
            raise DefinitionError(self.name, found)

    def __repr__(self) -> str:
        """Short: it is a default in signatures, which ``help`` prints."""
        return f"<MachineSpec {self.name!r}: {len(self.states)} states, {len(self.rows)} rows>"

    @property
    def own_facts(self) -> tuple[AnyFact, ...]:
        """Facts that are not of ``states.resources``, in order of first use: states, effects, guards, rows, uses."""
        own = dict.fromkeys(fact for facts in facts_used(self) for fact in facts if not isinstance(fact, Fact))
        return tuple(own)

    def state(self, name: str) -> State:
        return next(s for s in self.states if s.name == name)

    def effect(self, name: str) -> Effect:
        return next(e for e in self.effects if e.name == name)

    def guard(self, name: str) -> Guard:
        return next(g for g in self.guards if g.name == name)

    def row(self, event: str, source: str, match: Match | None = None, to: str | None = None) -> Row:
        """The one row of this event from this state. Raises ValueError where there is none, or a choice."""
        rows = (row for row in self.rows_from(source) if row.event == event)
        found = [row for row in rows if match in (None, row.match) and to in (None, row.target)]
        if len(found) != 1:
            raise ValueError(f"machine {self.name!r} has {len(found)} rows for {event} from {source}")
        return found[0]

    def rows_from(self, source: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.source == source)

    def refused_in(self, state: str) -> tuple[str, ...]:
        """The events that are listed as refused there."""
        return tuple(event for name, events in self.refused if name == state for event in events)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """A picture, for notebooks."""
        from lifecycle.render.notebook import mimebundle  # only a notebook asks

        return mimebundle(self)

    def _repr_svg_(self) -> str | None:
        from lifecycle.render.notebook import svg

        return svg(self)

    def advice_for(self, event: str, state: str) -> str:
        return next((a.text for a in self.advice if a.event == event and a.state == state), "")


def facts_used(spec: MachineSpec) -> Iterator[list[AnyFact]]:
    """The facts of each clause of the declaration, in its order; inside a clause in the order of their enums."""
    clauses = [
        *((state.holds, state.lacks) for state in spec.states),
        *((event.gives, event.takes) for event in spec.events),
        *((effect.needs, effect.forbids, effect.gives, effect.takes) for effect in spec.effects),
        *((guard.requires, guard.forbids) for guard in spec.guards),
        *((row.when, row.unless) for row in spec.rows),
        *((use.needs, use.forbids, use.or_when) for use in spec.uses),
    ]
    for clause in clauses:
        for facts in clause:
            yield sorted(facts, key=_place)


def _place(fact: AnyFact) -> tuple[str, int, str]:
    kind = type(fact)
    place = list(kind).index(fact) if issubclass(kind, StrEnum) else 0  # a bare string is refused by the checks
    return kind.__name__, place, str(fact)


def flat_name(state: str, suffix: str | None) -> str:
    return state if suffix is None else f"{state}_{suffix}"


def flat_states(spec: MachineSpec, tags: Iterable[str]) -> dict[str, tuple[State, str | None]]:
    """Every flat state with its declared state and its tag (per-tag states) or origin (per-origin states)."""
    others = [tag for tag in tags if tag != "actor"]
    flat: dict[str, tuple[State, str | None]] = {}
    for state in (s for s in spec.states if not s.per_origin):
        for suffix in others if state.per_tag else [None]:
            flat[flat_name(state.name, suffix)] = (state, suffix)
    for state in (s for s in spec.states if s.per_origin):
        entered_from = {row.source for row in spec.rows if row.target == state.name}
        for name, (origin, _) in list(flat.items()):
            if origin.name in entered_from:
                flat[flat_name(state.name, name)] = (state, name)
    return flat


def flat_rows(spec: MachineSpec, tags: Iterable[str]) -> Iterator[FlatRow]:
    """The rows, expanded over flat states and tags, in the order of the table."""
    tags = tuple(tags)
    flat = flat_states(spec, tags)
    for row in spec.rows:
        effects = tuple(spec.effect(name) for name in row.effects)
        guards = tuple(spec.guard(name) for name in row.guards)
        for source, (state, suffix) in flat.items():
            if state.name != row.source:
                continue
            for tag in _tags_of(row, suffix, tags):
                target = _target(spec, row, source, suffix, tag)
                yield FlatRow(_trigger(spec, row, tag), tag, source, target, row, effects, guards)


def _tags_of(row: Row, suffix: str | None, tags: tuple[str, ...]) -> list[str | None]:
    if row.match is Match.NONE:
        return [None]
    if row.match is Match.ACTOR:
        return ["actor"]
    if row.match is Match.SHOWN:
        return [suffix or "actor"]
    return [tag for tag in tags if tag != "actor"]


def _target(spec: MachineSpec, row: Row, source: str, suffix: str | None, tag: str | None) -> str:
    if row.target == SAME:
        return source
    if row.target == ORIGIN:
        assert suffix is not None  # the definition checks allow ORIGIN in per-origin states alone
        return suffix
    target = spec.state(row.target)
    if target.per_tag:
        return flat_name(target.name, tag)
    return flat_name(target.name, source if target.per_origin else None)


def _trigger(spec: MachineSpec, row: Row, tag: str | None) -> str:
    """Unique per event, tag and target, so that a trigger never has two transitions from one state."""
    siblings = {r.target for r in spec.rows if (r.event, r.source, r.match) == (row.event, row.source, row.match)}
    suffix = f"_to_{row.target}" if len(siblings) > 1 else ""
    return row.event + (f"_{tag}" if tag is not None else "") + suffix


def fold(facts: Mapping[AnyFact, bool], effect: Effect) -> dict[AnyFact, bool]:
    """What is known after the effect. Pure; the caller has checked needs and forbids."""
    return {**facts, **dict.fromkeys(effect.takes, False), **dict.fromkeys(effect.gives, True)}
