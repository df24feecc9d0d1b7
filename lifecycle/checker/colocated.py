"""The actor and its engines on one device, as one program: every move of either, under the joint rules.

Theory of operation. Each engine is a machine of its own (``states.rollout``), whose state and facts become bits beside
the actor's. An effect of the actor that is linked to an event of the engines asks it of each of them: the engine's row
is one micro-step, and where none answers the effect fails. What an engine's owner asks, requests that come and end, and
the death of an engine are moves of the environment. A rule that refuses rows of one machine while facts of the other
are true becomes part of their guards.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from lifecycle.checker.formula import FALSE, TRUE, Assignment, Bit, Expr, all_of, any_of
from lifecycle.checker.ground import GroundEffect, Model, Move, Program, ground, own_facts
from lifecycle.checker.meaning_sync import lost_engine
from lifecycle.checker.steps import Invariant, Micro, Way
from lifecycle.checker.words import Words
from states.joint import JointRule, JointSpec
from states.resources import AnyFact, Fact
from states.rollout import EngineFact
from states.spec import SAME, MachineSpec, Row, State

#: Events that an engine's owner asks, and those that requests cause; the rest is the sync's.
OWNED = (
    *("pause_generation", "continue_generation", "flush_cache", "generate", "finish"),
    *("release_weights", "release_kv_cache", "resume_weights", "resume_kv_cache"),
)
_ACTOR_REGIONS = ("weights", "optimizer", "rest")


def program_of(model: Model) -> Program:
    """The program to explore: of one machine, or of an actor and its engines."""
    return ground(model) if model.joint is None else colocated(model, model.joint)


def colocated(model: Model, joint: JointSpec) -> Program:
    """The program of one actor and as many engines as the model's instance has, which begin asleep."""
    program = ground(model)
    engines = [_Engine(program.words, name, joint) for name in model.instance.engines]
    own = [move for move in program.moves if not (move.environment and move.event.startswith("engine "))]
    moves = [_linked(_ruled(move, joint, engines), joint, engines) for move in own]
    for engine in engines:
        for flat, state in program.table.states.items():
            moves += engine.moves(flat, in_sync=state.origin is not None)
    invariants = (*model.invariants, _out_before_in(engines), *(one for engine in engines for one in engine.promises()))
    return evolve(
        program,
        model=evolve(program.model, invariants=invariants),
        bits=(*program.bits, *(name for engine in engines for name in engine.names())),
        true_at_first=program.true_at_first | {f"{engine.name}.at.ASLEEP" for engine in engines},
        moves=tuple(moves),
    )


def _out_before_in(engines: list[_Engine]) -> Invariant:
    return Invariant(
        "out_before_in",
        "The actor and an engine have memory of one device mapped at once: whoever comes second runs out of it "
        "(https://github.com/radixark/miles/pull/86).",
        lambda w: any_of(w(region) for region in _ACTOR_REGIONS),
        lambda w: all_of(~engine.holds_memory() for engine in engines),
    )


class _Engine:
    """One engine's bits, rows and promises."""

    def __init__(self, words: Words, name: str, joint: JointSpec) -> None:
        self.words, self.name, self.joint = words, name, joint
        self.spec: MachineSpec = joint.members[1]
        self.facts = own_facts(self.spec)

    def names(self) -> list[str]:
        return [f"{self.name}.at.{state.name}" for state in self.spec.states] + [self._name(f) for f in self.facts]

    def _name(self, fact: str) -> str:
        return f"{self.name}.own.{fact}"

    def at(self, state: str) -> Expr:
        return Bit(f"{self.name}.at.{state}")

    def fact(self, fact: AnyFact) -> Expr:
        """A condition of one call may be so or not."""
        return Bit(self._name(fact.value)) if fact.value in self.facts else TRUE

    def holds_memory(self) -> Expr:
        return self.fact(EngineFact.WEIGHTS_IN) | self.fact(EngineFact.KV_IN)

    def generates(self) -> Expr:
        return self.fact(EngineFact.REQUESTS)

    # rows

    def _ways(self, event: str, extra: Expr = TRUE) -> tuple[Way, ...]:
        """How the engine may answer the event, by its rows."""
        return tuple(
            Way(self._sets(row), self.at(row.source) & self._guard(row) & extra)
            for row in self.spec.rows
            if row.event == event
        )

    def _guard(self, row: Row) -> Expr:
        known = [fact for fact in row.when if fact.value in self.facts]
        unknown = [fact for fact in row.unless if fact.value in self.facts]
        for guard in (self.spec.guard(name) for name in row.guards):
            known += [fact for fact in guard.requires if fact.value in self.facts]
            unknown += [fact for fact in guard.forbids if fact.value in self.facts]
        return all_of([*map(self.fact, sorted(known)), *(~self.fact(fact) for fact in sorted(unknown))])

    def _sets(self, row: Row) -> tuple[Assignment, ...]:
        target = row.source if row.target == SAME else row.target
        sets: list[Assignment] = [(f"{self.name}.at.{state.name}", FALSE) for state in self.spec.states]
        sets.append((f"{self.name}.at.{target}", TRUE))
        for effect in (self.spec.effect(name) for name in row.effects):
            sets += [(self._name(fact.value), FALSE) for fact in sorted(effect.takes)]
            sets += [(self._name(fact.value), TRUE) for fact in sorted(effect.gives)]
            if EngineFact.VERSION_HELD in effect.takes:
                sets += lost_engine(self.words, self.name)
            if EngineFact.VERSION_HELD in effect.gives:  # true of it also where the actor is never told
                sets.append((f"{self.name}.sound", Bit(f"{self.name}.received")))
        return tuple(sets)

    # what the actor's effects ask

    def asked(self, effect: str) -> Iterator[Micro]:
        """The linked events. Those that clean up after a failure never fail themselves."""
        touched = Bit(f"{self.name}.touched")
        when = {"abort_updates": touched, "continue_untouched": ~touched & self.at("PAUSED")}.get(effect, TRUE)
        cleans_up = effect in ("abort_updates", "continue_untouched")
        if effect == "send_weights":  # whatever an engine of unknown content has open is ended first
            yield self._micro("abort_update", ~Bit(f"{self.name}.known"), cleans_up)
        for link in self.joint.linked(effect):
            if not link.unless:  # engines of this model read by themselves
                yield self._micro(link.event, when, cleans_up)

    def _micro(self, event: str, when: Expr, cleans_up: bool) -> Micro:
        ways = self._ways(event)
        answered = any_of(way.when for way in ways)
        return Micro(ways, when & answered if cleans_up else when, TRUE if cleans_up else answered, real=True)

    # what happens by itself

    def moves(self, flat: str, in_sync: bool) -> Iterator[Move]:
        for event in OWNED if not in_sync else ("generate", "finish"):
            for way in self._ways(event, self._allowed(event)):
                name = f"engine {self.name} {event}"
                yield Move(name, None, "", flat, flat, way.when, (), way.sets, environment=True)
        gone = [(name, FALSE) for name in self.names()] + [(f"{self.name}.at.ASLEEP", TRUE)]
        sets = tuple(dict([*gone, *lost_engine(self.words, self.name)]).items())
        yield Move(f"engine {self.name} dies", None, "", flat, flat, ~self.at("STOPPED"), (), sets, environment=True)

    def _allowed(self, event: str) -> Expr:
        """What rules about the engine ask of the actor."""
        effects = {name for row in self.spec.rows if row.event == event for name in row.effects}
        asked = [rule for rule in self.joint.rules if rule.machine == self.spec.name and effects & set(rule.effects)]
        return all_of(~self._actor(fact) for rule in asked for fact in sorted(rule.forbids))

    def _actor(self, fact: AnyFact) -> Expr:
        names = {Fact.WEIGHTS: "weights", Fact.OPTIMIZER: "optimizer", Fact.GRADS: "grads", Fact.REST: "rest"}
        assert isinstance(fact, Fact)
        return Bit(names[fact])

    # promises

    def _contract(self, state: State) -> Invariant:
        contract = [*map(self.fact, sorted(state.holds)), *(~self.fact(fact) for fact in sorted(state.lacks))]
        why = "An engine rests in a state whose contract is not true."
        return Invariant("engine_contract", why, lambda w: self.at(state.name), lambda w: all_of(contract))

    def promises(self) -> Iterator[Invariant]:
        for state in self.spec.states:
            yield self._contract(state)
        yield Invariant(
            "no_mixed_request",
            "A request is under way in an engine that does not hold all bytes of the version it names.",
            lambda w: self.generates(),
            lambda w: self.fact(EngineFact.VERSION_HELD) & Bit(f"{self.name}.sound"),
        )
        yield Invariant(
            "engine_is_known",
            "The actor takes an engine for one that holds a version which it does not hold.",
            lambda w: Bit(f"{self.name}.known"),
            lambda w: self.fact(EngineFact.VERSION_HELD),
        )


# the actor's moves


def _ruled(move: Move, joint: JointSpec, engines: list[_Engine]) -> Move:
    rules = [rule for rule in joint.rules if rule.machine == joint.leader.name and _concerns(rule, move)]
    refusing = [engine.fact(fact) for engine in engines for rule in rules for fact in sorted(rule.forbids)]
    return evolve(move, guard=all_of([move.guard, *(~expr for expr in refusing)]))


def _concerns(rule: JointRule, move: Move) -> bool:
    return any(effect.name in rule.effects for effect in move.effects)


def _linked(move: Move, joint: JointSpec, engines: list[_Engine]) -> Move:
    return evolve(move, effects=tuple(_asking(effect, engines) for effect in move.effects))


def _asking(effect: GroundEffect, engines: list[_Engine]) -> GroundEffect:
    """The engines are asked before the actor notes that they have answered."""
    inverse = None if effect.inverse is None else _asking(effect.inverse, engines)
    asked = tuple(micro for engine in engines for micro in engine.asked(effect.name))
    return evolve(effect, micros=(*asked, *effect.micros), inverse=inverse)
