"""From state, facts and table to what an event would do, or why it is refused. Pure: nothing here acts.

Theory of operation. The table is expanded once per actor over its tags (``Table``). Asking for an event finds the flat
row of (event, flat state, tag), lets its guards look at the facts, and folds the row's effects over the facts to list
what each has to do. The executor runs the same row; it folds again with the facts that really came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import evolve, field, frozen

from lifecycle.actions import Action, Call, Probe
from lifecycle.errors import Faulted, LifecycleError, NoReadableCopy, TransitionRefused, UnknownTag
from lifecycle.outcome import Settings, after, during, rotated
from lifecycle.versions import ACTOR, Facts, landed, shown
from lifecycle.work import actions
from states.resources import VERSION_SLOTS, AnyFact, Fact, Region, Slot
from states.spec import FlatRow, Guard, MachineSpec, State, Use, flat_rows, flat_states


@frozen
class ActorState:
    """A state as users see it. ``tag`` is set in SWITCHED, ``effect`` in FAULTED, ``origin`` in SYNCING.

    ``arriving``: bytes of it are still on their way to the device, and waited for by whatever needs them.
    """

    name: str
    tag: str | None = None
    origin: str | None = None
    effect: str | None = None
    arriving: bool = False

    def __str__(self) -> str:
        inner = self.tag or self.effect
        name = f"{self.name}({inner})" if inner else self.name
        return f"{name}, arriving" if self.arriving else name


@frozen
class PlannedEffect:
    """One effect of a plan that has something to do, with the bytes it will move at most."""

    name: str
    nbytes: int
    actions: tuple[Action, ...]


@frozen
class Plan:
    """What an event would do: the effects and the state it leads to; or the refusal."""

    event: str
    source: str
    target: str | None
    effects: tuple[PlannedEffect, ...] = ()
    refusal: LifecycleError | None = None

    @property
    def nbytes(self) -> int:
        return sum(effect.nbytes for effect in self.effects)

    def __str__(self) -> str:
        """A line of what leads where, and one for each effect; or the refusal."""
        if self.refusal is not None:
            return str(self.refusal)
        width = max((len(effect.name) for effect in self.effects), default=0)
        lines = [f"  {e.name:{width}}" + (f"  {e.nbytes:,} bytes" if e.nbytes else "") for e in self.effects]
        return "\n".join([f"{self.event}: {self.source} → {self.target}", *(line.rstrip() for line in lines)])


@frozen
class Table:
    """A machine's declaration, expanded over the tags of one actor."""

    spec: MachineSpec
    tags: tuple[str, ...]
    states: Mapping[str, ActorState]
    names: Mapping[str, str]  # flat state to what users read, "SWITCHED(ref)"
    shown: Mapping[str, str | None]  # flat state to the tag whose version the device shows there
    uses: Mapping[str, Use]
    rows: Mapping[tuple[str, str, str | None], tuple[FlatRow, ...]]
    all_rows: tuple[FlatRow, ...] = field(repr=False)
    firsts: Mapping[AnyFact, str]  # what stands in the way, and the event by which it goes by itself
    no_forward: frozenset[str]  # flat states in which the hooks refuse every forward; after the end there are none

    @classmethod
    def of(cls, spec: MachineSpec, tags: Iterable[str]) -> Table:
        tags = tuple(tags)
        rows: dict[tuple[str, str, str | None], tuple[FlatRow, ...]] = {}
        flat = tuple(flat_rows(spec, tags))
        for row in flat:
            key = (row.row.event, row.source, row.tag)
            rows[key] = (*rows.get(key, ()), row)
        states = {name: _user_state(*found) for name, found in flat_states(spec, tags).items()}
        names = {name: str(state) for name, state in states.items()}
        shown = {name: _shown(spec, tags, states, name) for name in states}
        uses = {use.operation: use for use in spec.uses}
        firsts = {fact: guard.first for guard in spec.guards if guard.first for fact in guard.forbids}
        return cls(spec, tags, states, names, shown, uses, rows, flat, firsts, _without_forward(spec, states))

    def candidates(self, event: str, source: str, tag: str | None) -> tuple[FlatRow, ...]:
        """Rows for this very tag, or else rows whose choice the tag does not take part in."""
        return self.rows.get((event, source, tag)) or self.rows.get((event, source, None), ())


def _shown(spec: MachineSpec, tags: tuple[str, ...], states: Mapping[str, ActorState], flat: str) -> str | None:
    state = states[flat]
    if state.origin is not None:
        return _shown(spec, tags, states, state.origin)
    tag = spec.state(state.name).shows
    if tag is not None and tag not in tags:
        raise ValueError(f"state {state.name} of machine {spec.name!r} shows the tag {tag!r}, which is not declared")
    return state.tag or tag


def _without_forward(spec: MachineSpec, states: Mapping[str, ActorState]) -> frozenset[str]:
    allowed = {name for use in spec.uses if use.operation == "forward" for name in use.states}
    allowed |= {state.name for state in spec.states if state.final}
    return frozenset(flat for flat, state in states.items() if state.name not in allowed)


def _user_state(state: State, suffix: str | None) -> ActorState:
    if state.per_tag:
        return ActorState(state.name, tag=suffix)
    return ActorState(state.name, origin=suffix if state.per_origin else None)


# facts


def region_needs(facts: Facts, row: FlatRow, probe: Probe) -> int:
    """Bytes that the row would have to map."""
    wanted: tuple[Region, ...] = ()
    if "resume_actor_regions" in row.row.effects:
        wanted = (Region.WEIGHTS, Region.REST, Region.OPTIMIZER)
    elif "resume_forward_regions" in row.row.effects:
        wanted = (Region.WEIGHTS, Region.REST)
    return sum(probe.region_bytes(region) for region in wanted if region not in facts.resident)


def _memory_short(facts: Facts, call: Call, row: FlatRow, probe: Probe, margin: int) -> bool:
    needed = region_needs(facts, row, probe)
    if not needed:
        return False
    available = probe.available_bytes()
    return available is not None and available < needed + margin


def _rotates_shown(facts: Facts, call: Call) -> bool:
    """A rotation that leaves the tag where it is moves nothing."""
    after_it = rotated(facts.tags, call.rotate)
    watched = {ACTOR, call.shown or ACTOR}
    return any(after_it[tag] != facts.tags[tag] for tag in watched)


_Condition = Callable[[Facts, Call, FlatRow, Probe, int], bool]

CONDITIONS: dict[AnyFact, _Condition] = {
    Fact.WORKING: lambda facts, *_: facts.phase is not None,
    Fact.ARRIVING: lambda facts, *_: any(slot in facts.arriving for slot in VERSION_SLOTS),
    Fact.OPTIMIZER_ARRIVING: lambda facts, *_: Slot.OPTIMIZER in facts.arriving,
    Fact.LOADING: lambda facts, *_: facts.load is not None,
    Fact.SCOPE_OPEN: lambda facts, *_: bool(facts.scopes),
    Fact.BACKWARD_LEFT: lambda facts, call, row, probe, _: facts.backward_seen and probe.grad_bytes() > 0,
    # a sync's own lease is the sync's: whoever recovers or closes ends it
    Fact.DEVICE_LEASED: lambda facts, *_: any(lease.on_device for lease in facts.leases if lease.reader != "sync"),
    Fact.LEASED: lambda facts, *_: any(lease.reader != "sync" for lease in facts.leases),
    Fact.MEMORY_SHORT: _memory_short,
    Fact.GRAPHS_PIN_ADDRESSES: lambda facts, call, row, probe, _: (
        not probe.keeps_addresses() and probe.graphs_captured()
    ),
    Fact.TAG_IS_ACTOR: lambda facts, call, *_: call.tag == ACTOR,
    Fact.TAG_IS_SHOWN: lambda facts, call, *_: call.tag == call.shown,
    Fact.OF_WORKING: lambda facts, call, *_: facts.version_of(call.of or ACTOR).working,
    Fact.ROTATES_SHOWN: lambda facts, call, *_: _rotates_shown(facts, call),
    Fact.NO_OPTIMIZER: lambda facts, call, row, probe, _: not probe.has_optimizer(),
    Fact.TARGET_HELD: lambda facts, call, *_: shown(facts, facts.tags[call.tag or ACTOR]),
    Fact.WEIGHTS_LOST: lambda facts, call, row, probe, _: Region.WEIGHTS not in probe.mapped(),
    # resources that uses ask for, or a guard where no contract knows them
    Fact.HOOKS: lambda facts, call, row, probe, _: probe.installed(),
    Fact.WEIGHTS: lambda facts, *_: Region.WEIGHTS in facts.resident,
    Fact.OPTIMIZER_VALID: lambda facts, *_: facts.backups.get(Slot.OPTIMIZER) == facts.device.get(Slot.OPTIMIZER),
}


def holds(fact: AnyFact, facts: Facts, call: Call, row: FlatRow, probe: Probe, margin: int = 0) -> bool:
    """Whether it is true now. A machine's own fact is what the effects that give and take it left."""
    condition = CONDITIONS.get(fact)
    return fact in facts.own if condition is None else condition(facts, call, row, probe, margin)


def failed_guard(row: FlatRow, facts: Facts, call: Call, probe: Probe, margin: int) -> Guard | None:
    """The first guard that says no."""
    for guard in row.guards:
        for fact in guard.forbids:
            if holds(fact, facts, call, row, probe, margin):
                return guard
        for fact in guard.requires:
            if not holds(fact, facts, call, row, probe, margin):
                return guard
    return None


def _choose(rows: tuple[FlatRow, ...], facts: Facts, call: Call, probe: Probe) -> FlatRow | None:
    """The row whose ``when`` holds and whose ``unless`` does not."""
    for row in rows:
        if _applies(row, facts, call, probe):
            return row
    return None


def _applies(row: FlatRow, facts: Facts, call: Call, probe: Probe) -> bool:
    if not all(holds(fact, facts, call, row, probe) for fact in row.row.when):
        return False
    return not any(holds(fact, facts, call, row, probe) for fact in row.row.unless)


# asking


def allowed_events(table: Table, source: str) -> list[str]:
    """What a caller may ask for in this flat state, by name, in the order of the table."""
    return _public(table.spec, (row.row.event for row in table.all_rows if row.source == source))


def _public(spec: MachineSpec, events: Iterable[str]) -> list[str]:
    """Names that callers use, each once; start_sync is the beginning of what they call sync."""
    internal = {event.name for event in spec.events if event.internal} - {"start_sync"}
    return ["sync" if event == "start_sync" else event for event in dict.fromkeys(events) if event not in internal]


def public_events(spec: MachineSpec) -> list[str]:
    """Every event that a caller may ask for somewhere, in the order of the declaration."""
    return _public(spec, (event.name for event in spec.events))


def allowed_now(table: Table, source: str, facts: Facts, call: Call, probe: Probe, margin: int) -> list[str]:
    """Those of ``allowed_events`` that, for some tag, no guard refuses now."""
    open_rows = (
        row
        for row in table.all_rows
        if row.source == source
        and failed_guard(row, facts, evolve(call, event=row.row.event, tag=row.tag), probe, margin) is None
    )
    return _public(table.spec, (row.row.event for row in open_rows))


def find_row(
    table: Table, source: str, facts: Facts, call: Call, probe: Probe, margin: int = 0
) -> FlatRow | TransitionRefused:
    """The flat row that answers this call, or the refusal. Total: never raises for bad input of a caller."""
    state = table.states[source]
    if not {call.tag, call.of} - {None} <= facts.tags.keys():
        unknown = next(tag for tag in (call.tag, call.of) if tag is not None and tag not in facts.tags)
        return UnknownTag(call.event, str(state), unknown, facts.tags)
    row = _choose(table.candidates(call.event, source, call.tag), facts, call, probe)
    if row is None:
        return no_row(table, source, call)
    guard = failed_guard(row, facts, call, probe, margin)
    if guard is None:
        return row
    reason = guard.reason
    if Fact.MEMORY_SHORT in guard.forbids:
        needed, free = region_needs(facts, row, probe), probe.available_bytes()
        reason += f": {needed} bytes needed, with a margin of {margin}, and {free} are free"
    allowed = allowed_now(table, source, facts, call, probe, margin)
    return TransitionRefused(call.event, str(state), allowed, reason, guard.advice)


def first_event(table: Table, source: str, facts: Facts, call: Call, probe: Probe, margin: int = 0) -> str | None:
    """The internal event that the row for this call asks for first, if it is refused for no other reason yet."""
    row = _choose(table.candidates(call.event, source, call.tag), facts, call, probe)
    guard = None if row is None else failed_guard(row, facts, call, probe, margin)
    return None if guard is None else guard.first


def no_row(table: Table, source: str, call: Call) -> TransitionRefused:
    state = table.states[source]
    if state.name == "FAULTED":
        return Faulted(call.event, state.effect or "an effect")
    asked = f"{call.event}({call.tag})" if call.tag else call.event
    return TransitionRefused(
        asked,
        str(state),
        allowed_events(table, source),
        "there is no such transition",
        table.spec.advice_for(call.event, state.name),
    )


def make_plan(
    table: Table, source: str, facts: Facts, call: Call, probe: Probe, settings: Settings, margin: int = 0
) -> Plan:
    """What the event would do once all bytes have come. Bytes are upper bounds where only measuring can tell."""
    facts = landed(facts)
    row = find_row(table, source, facts, call, probe, margin)
    if isinstance(row, TransitionRefused):
        return Plan(call.event, table.names[source], None, refusal=row)
    try:
        effects = preview(row, facts, call, probe, settings)
    except NoReadableCopy as error:
        return Plan(call.event, table.names[source], None, refusal=error)
    return Plan(call.event, table.names[source], table.names[row.target], effects)


def preview(row: FlatRow, facts: Facts, call: Call, probe: Probe, settings: Settings) -> tuple[PlannedEffect, ...]:
    """The row's effects that have something to do. Raises NoReadableCopy where one would lack its source.

    What comes after ``read_back`` is a guess, since only it tells what there is: then nothing is raised.
    """
    planned = []
    guessing = False
    for effect in row.effects:
        guessing = guessing or effect.name == "read_back"
        try:
            todo = actions(effect, facts, call, probe)
        except NoReadableCopy:
            if not guessing:
                raise
            todo = ()
        for action in todo:
            facts = after(during(facts, action), action, None, call, settings)
        if todo:
            planned.append(PlannedEffect(effect.name, sum(action.moved_bytes for action in todo), todo))
    return tuple(planned)
