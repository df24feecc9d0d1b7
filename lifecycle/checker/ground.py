"""A declared machine, grounded: every row for every tag it can be about, every effect as micro-steps over bits.

Theory of operation. ``Model`` is what is checked: a declaration, what its effects mean, and an instance. ``ground``
turns it into a ``Program``: names of bits, flat states, and moves with a guard. An event's move runs its effects in
order, each of which may fail between any two micro-steps; then the inverses of those that had begun run in reverse, and
each of them may fail too. A move of the environment changes facts at once. Exploration and export both read the
program, and know nothing of the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attrs import evolve, field, frozen

from lifecycle.checker.facts import BITS, INPUT_BITS, condition, contract, forbidden, needed
from lifecycle.checker.formula import FALSE, TRUE, Assignment, Expr, all_of, any_of, bits_of
from lifecycle.checker.meaning import MEANINGS
from lifecycle.checker.meaning_memory import REGIONS
from lifecycle.checker.meaning_sync import lost_engine
from lifecycle.checker.steps import NO_MEANINGS, Asked, Invariant, Meanings, Micro, change, note
from lifecycle.checker.words import ACTOR, Instance, Words
from lifecycle.plan import Table
from states.actor import ACTOR as ACTOR_SPEC
from states.joint import JointSpec
from states.resources import PROGRESS, AnyFact, Fact
from states.spec import Effect, FlatRow, MachineSpec


@frozen
class Model:
    """What is checked. ``meanings``: of effects of one's own, or in place of the catalogue's.

    ``invariants`` are asked beside those that the checker knows. ``joint``: rules under which ``spec`` leads engines
    that are machines of their own.
    """

    spec: MachineSpec = ACTOR_SPEC
    instance: Instance = field(factory=Instance)
    meanings: Meanings = NO_MEANINGS
    invariants: tuple[Invariant, ...] = ()
    joint: JointSpec | None = None


@frozen
class GroundEffect:
    """One effect in one row. ``needs`` and ``gives`` are formulas, checked before it where it acts, and after it."""

    name: str
    micros: tuple[Micro, ...]
    undoable: bool = True
    inverse: GroundEffect | None = None
    needs: Expr = TRUE
    unmet: tuple[tuple[str, Expr], ...] = ()
    gives: Expr = TRUE

    @property
    def work(self) -> Expr:
        return any_of(micro.when for micro in self.micros)


@frozen
class Move:
    """One thing that can happen in a flat state; a move of the environment has no effects, only ``sets``."""

    event: str
    tag: str | None
    note: str
    source: str
    target: str
    guard: Expr
    effects: tuple[GroundEffect, ...] = ()
    sets: tuple[Assignment, ...] = ()
    environment: bool = False
    together: tuple[tuple[Expr, bool], ...] = ()  # what the ranks decide at once, and how for this row
    meets: bool = False  # its row has a place where the ranks agree
    agreed_at: int = 0  # effects before this place can still be undone by every rank


def reads_and_writes(move: Move) -> tuple[frozenset[str], frozenset[str]]:
    """Bits that the move may read, and those it may write."""
    reads, writes = set(bits_of(move.guard)), set()
    effects = [effect for one in move.effects for effect in (one, one.inverse) if effect is not None]
    for effect in effects:
        reads |= bits_of(effect.needs) | bits_of(effect.gives)
    sets = list(move.sets)
    for micro in (micro for effect in effects for micro in effect.micros):
        reads |= bits_of(micro.when) | bits_of(micro.succeeds) | bits_of(micro.sound)
        for way in micro.ways:
            reads |= bits_of(way.when)
            sets += way.sets
    for name, value in sets:
        writes.add(name)
        reads |= bits_of(value)
    return frozenset(reads), frozenset(writes)


@frozen
class Program:
    """The grounded machine. ``faults``: flat state to where a fault leads from it."""

    model: Model
    words: Words
    bits: tuple[str, ...]
    table: Table
    initial: str
    true_at_first: frozenset[str]
    moves: tuple[Move, ...]
    faults: dict[str, str]
    contracts: dict[str, Expr]
    homes: frozenset[str] = field(default=frozenset())


def own_facts(spec: MachineSpec) -> tuple[str, ...]:
    """Texts of the own facts that states or effects are about; others are conditions of one call."""
    lasting = {fact for state in spec.states for fact in state.holds | state.lacks}
    lasting |= {fact for effect in spec.effects for fact in effect.gives | effect.takes}
    return tuple(fact.value for fact in spec.own_facts if fact in lasting)


def ground(model: Model, together: frozenset[AnyFact] = frozenset()) -> Program:
    """The program. ``together``: facts by which rows are chosen once for all ranks, and so not by the guard of one.

    Raises ValueError for an effect that nobody has given a meaning.
    """
    known = {effect.name for effect in model.spec.effects}
    if unknown := sorted(set(model.meanings) - known):
        raise ValueError(f"meanings of {', '.join(unknown)}: machine {model.spec.name!r} has no such effects")
    trains = any(Fact.OPTIMIZER in state.holds for state in model.spec.states)
    model = evolve(model, instance=evolve(model.instance, optimizer=trains))
    words = Words(model.instance, own_facts(model.spec))
    table = Table.of(model.spec, model.instance.all_tags)
    moves = [move for row in table.all_rows for move in _moves_of(model, words, table, row, together)]
    faults = {row.source: row.target for row in table.all_rows if row.row.event == "fault"}
    contracts = {
        flat: contract(state.holds, state.lacks, words, table.shown[flat])
        for flat, state in ((flat, model.spec.state(found.name)) for flat, found in table.states.items())
    }
    finals = {state.name for state in model.spec.states if state.final}
    homes = frozenset(flat for flat, state in table.states.items() if state.name in finals | {model.spec.initial})
    return Program(
        model,
        words,
        words.names(),
        table,
        model.spec.initial,
        _first(model, words),
        (*moves, *_environment(model, words, table)),
        faults,
        contracts,
        homes,
    )


def _first(model: Model, words: Words) -> frozenset[str]:
    """Attached: one version that every tag points at and that the device alone holds; engines hold nothing."""
    held = model.spec.state(model.spec.initial).holds
    own = {f"own.{fact.value}" for fact in held if not isinstance(fact, Fact)}
    if Fact.HOOKS not in held:
        return frozenset(own)
    tags, slots = model.instance.all_tags, model.instance.slots
    pairs = ((one, other) for n, one in enumerate(tags) for other in tags[n + 1 :])
    same = {name for pair in pairs for slot in slots for name in bits_of(words.same(*pair, slot))}
    device = {f"device.{tag}.{slot}" for tag in tags for slot in slots}
    regions = {name for region in words.of.backups for name in (region, f"{region}.valid")}
    return frozenset(own | same | device | regions | {"weights", "groups", "hooks"})


# events


def _variants(words: Words, row: FlatRow, shown: str | None) -> Iterator[tuple[Asked, Expr]]:
    """The ways to ask for the row's event, each with what has to be true for it."""
    event, one = row.row.event, words.of
    asked = Asked(words, event, row.tag, shown=shown)
    if event == "tag":
        pairs = ((tag, of) for tag in one.all_tags for of in one.all_tags if tag != of)
        yield from ((evolve(asked, tag=tag, of=of), TRUE) for tag, of in pairs)
    elif event == "load":
        yield from ((evolve(asked, tag=tag), TRUE) for tag in one.all_tags)
    elif event == "finish_load":
        yield from ((evolve(asked, tag=tag), words(f"loading.{tag}")) for tag in one.all_tags)
    elif event == "start_sync":
        for tag in one.all_tags if one.engines else ():  # a sync is to one engine at least
            yield evolve(asked, tag=tag, host_only=False), TRUE
            yield evolve(asked, tag=tag, host_only=True), TRUE
    elif event == "finish_sync":
        yield asked, TRUE
        yield from ((evolve(asked, rotate=tag), TRUE) for tag in one.tags)
        yield from ((evolve(asked, rotate=ACTOR, of=tag), TRUE) for tag in one.tags)
    else:
        yield asked, TRUE


def _moves_of(model: Model, words: Words, table: Table, row: FlatRow, together: frozenset[AnyFact]) -> Iterator[Move]:
    apart = evolve(row.row, when=row.row.when - together, unless=row.row.unless - together)
    chosen = [(fact, True) for fact in row.row.when & together] + [(fact, False) for fact in row.row.unless & together]
    for asked, extra in _variants(words, row, table.shown[row.source]):
        guard = extra & _row_guard(evolve(row, row=apart), asked) & _promised_rotation(table, row, asked)
        if guard == FALSE:
            continue
        effects = tuple(_grounded(model, effect, asked) for effect in row.effects)
        remembered = (*REGIONS, *(f"published.{tag}" for tag in model.instance.labels))
        begin = [(f"before.{name}", words(name)) for name in remembered]
        begin += _inputs(model, table, row, words)
        decided = tuple((condition(fact, asked), value) for fact, value in chosen)
        told = (row.row.event, asked.tag, _note(asked), row.source, row.target)
        yield Move(*told, guard, effects, tuple(begin), **_meeting(row, model.spec.agree), together=decided)


def _meeting(row: FlatRow, agree: str) -> dict[str, Any]:
    """Where the ranks meet; a row that does not agree is run by each for itself, and whoever fails takes all along."""
    names = [effect.name for effect in row.effects]
    return {"meets": agree in names, "agreed_at": names.index(agree) if agree in names else 0}


def _inputs(model: Model, table: Table, row: FlatRow, words: Words) -> Iterator[Assignment]:
    """See [Note: inputs]: each may be so wherever it can be, unless a guard of the row says no."""
    w, one = words, words.of
    forbidden = {fact for guard in row.guards for fact in guard.forbids if isinstance(fact, Fact)}
    ruled_out = {name for fact in forbidden for name in INPUT_BITS.get(fact, ())}
    shown = table.shown[row.source] is not None
    device = any_of(w.device(tag, slot) for tag in one.all_tags for slot in one.slots)
    copied = any_of(w.copied(tag, slot) for tag in one.all_tags for slot in one.slots)
    possible = {
        "scope": TRUE if shown else FALSE,
        "backward_left": w("grads") & ~w("working") if shown else FALSE,
        "reading.device": device & w("weights") & ~w.arriving(),  # who reads has waited
        "reading.host": copied,
        "memory_short": TRUE,
        "no_optimizer": TRUE,
    }
    yield from ((name, expr) for name, expr in possible.items() if name not in ruled_out and expr != FALSE)


def _promised_rotation(table: Table, row: FlatRow, asked: Asked) -> Expr:
    """A rotation is asked for when the sync starts: what its rows refuse there does not come to this."""
    origin = table.states[row.source].origin
    if asked.rotate is None or origin is None:
        return TRUE
    starts = [start for start in table.all_rows if start.row.event == "start_sync" and start.source == origin]
    forbidden = {fact for start in starts for guard in start.guards for fact in guard.forbids}
    return ~condition(Fact.ROTATES_SHOWN, asked) if Fact.ROTATES_SHOWN in forbidden else TRUE


def _note(asked: Asked) -> str:
    parts = [f"of {asked.of}" if asked.of else "", f"rotate {asked.rotate}" if asked.rotate else ""]
    return ", ".join(
        part for part in [*parts, "to an engine that reads host memory" if asked.host_only else ""] if part
    )


def _row_guard(row: FlatRow, asked: Asked) -> Expr:
    """Conditions of one call that are own facts may be so or not, whatever the state: they rule nothing out."""

    def conditions(facts: Iterable[AnyFact]) -> list[Expr]:
        return [condition(fact, asked) for fact in sorted(facts) if isinstance(fact, Fact) or fact in asked.words.own]

    parts = [*conditions(row.row.when), *(~expr for expr in conditions(row.row.unless))]
    for guard in row.guards:
        parts += [*conditions(guard.requires), *(~expr for expr in conditions(guard.forbids))]
    return all_of(parts)


def _grounded(model: Model, effect: Effect, asked: Asked) -> GroundEffect:
    name = effect.name
    unmet = [
        *((f"needs: {fact.value}", needed(fact, name, asked)) for fact in sorted(effect.needs)),
        *((f"forbids: {fact.value}", ~forbidden(fact, name, asked)) for fact in sorted(effect.forbids)),
    ]
    inverse = None
    if effect.inverse is not None:
        inverse = GroundEffect(effect.inverse, _meaning(model, model.spec.effect(effect.inverse), asked))
    micros = _meaning(model, effect, asked)
    needs = all_of(expr for _, expr in unmet)
    return GroundEffect(name, micros, effect.undoable, inverse, needs, tuple(unmet), _promise(effect, asked))


_PROMISED = frozenset(BITS) - {Fact.SYNC_GROUPS}


def _promise(effect: Effect, asked: Asked) -> Expr:
    """What must be true after it. Compound facts are promises to the effects that need them, and checked there."""
    keep = asked.words.of.keep
    gives = [fact for fact in effect.gives if not isinstance(fact, Fact) or fact in _PROMISED]
    takes = [fact for fact in effect.takes if not isinstance(fact, Fact) or fact in _PROMISED | {Fact.SYNC_GROUPS}]
    return all_of(
        [
            *(condition(fact, asked) for fact in sorted(gives) if fact is not Fact.ENGINES_PAUSED),
            *(~forbidden(fact, "", asked) for fact in sorted(takes) if not _kept(fact, keep)),
        ]
    )


def _kept(fact: object, keep: frozenset[str]) -> bool:
    return isinstance(fact, Fact) and fact is Fact.GRADS and "grads" in keep


def _meaning(model: Model, effect: Effect, asked: Asked) -> tuple[Micro, ...]:
    found = model.meanings.get(effect.name) or MEANINGS.get(effect.name)
    if found is not None:
        return tuple(micro for micro in found(asked) if micro.when != FALSE)
    given, taken = effect.gives - PROGRESS, effect.takes - PROGRESS
    names = {True: [_own_bit(effect, f) for f in given], False: [_own_bit(effect, f) for f in taken]}
    sets = [pair for value, bits in names.items() for pair in asked.words.let(value, *sorted(bits))]
    missing = [asked.words(name) for name in names[False]] + [~asked.words(name) for name in names[True]]
    acts = any_of(missing) if missing else TRUE
    # without a fault state there is no place for a step that was half done: its machine promises that there is none
    return (change(sets, when=acts) if any(row.event == "fault" for row in model.spec.rows) else note(sets, when=acts),)


def _own_bit(effect: Effect, fact: Any) -> str:
    if not isinstance(fact, Fact):
        return f"own.{fact.value}"
    raise ValueError(
        f"effect {effect.name} is your own, and gives or takes {fact.name} ({fact.value}), which is this library's: "
        f"leave it out, or say what the effect does to the facts in Model(..., meanings={{{effect.name!r}: ...}})"
    )


# environment


def _environment(model: Model, words: Words, table: Table) -> Iterator[Move]:
    """What the trainer, its readers and the engines do of themselves."""
    w = words
    grown = (*w.let(True, "workspaces"), ("rest.copied", w("rest.copied") & ~w("rest.valid")))
    backward = _allowed(model, table, "backward")
    for flat in _allowed(model, table, "forward"):
        used = (*grown, *(w.let(True, "grads") if flat in backward else ()))
        name = "forward and backward" if flat in backward else "forward"
        yield _move(name, flat, w("weights"), used)
        yield _move("capture graphs", flat, w("weights"), (*grown, *w.let(True, "graphs")))
    for flat, state in table.states.items():
        for engine in w.of.engines:
            yield from _engine_moves(w, flat, engine, owned=state.origin is None)


def _engine_moves(w: Words, flat: str, engine: str, owned: bool) -> Iterator[Move]:
    yield _move(f"engine {engine} dies", flat, w(f"{engine}.known"), lost_engine(w, engine))
    if owned:  # outside a sync its owner pauses and continues it
        generating, known = w(f"{engine}.generating"), w(f"{engine}.known")
        yield _move(f"engine {engine} pauses", flat, generating, w.let(False, f"{engine}.generating"))
        yield _move(f"engine {engine} continues", flat, known & ~generating, w.let(True, f"{engine}.generating"))


def _move(name: str, flat: str, guard: Expr, sets: Iterable[Assignment]) -> Move:
    return Move(name, None, "", flat, flat, guard, (), tuple(dict(sets).items()), environment=True)


def _allowed(model: Model, table: Table, operation: str) -> list[str]:
    """Flat states in which the trainer may do this."""
    states = {state for use in model.spec.uses if use.operation == operation for state in use.states}
    return [flat for flat, found in table.states.items() if found.name in states]
