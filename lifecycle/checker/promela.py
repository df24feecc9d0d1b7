"""The grounded machine as a Promela model, so that Spin can check it without any of our exploration.

Theory of operation. The model is one process. A state that Spin stores is a *resting* state (a flat state and the
facts) or a *moment*: an event is under way and the next micro-step has something to do. One transition is a choice
(which event or move of the environment begins, or how the micro-step ends: it fails before it has begun, it is done in
one of its ways, or it is done and fails right after) and what then follows without any choice, which the model calls
"settle": steps that have nothing to do are passed over, effects begin and end, after a failure the inverses of those
that had begun are taken up in reverse, and at the end the machine rests. Nothing in between is stored.

What is asked is asserted where it comes up; the variable ``broken`` then says which of ``names_asked`` it was. Of each
resting state a line is printed once, so that resting states can be counted apart from moments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import define, field

from lifecycle.checker.formula import FALSE, TRUE, And, Assignment, Bit, Const, Expr, Not, Or, bits_of
from lifecycle.checker.ground import GroundEffect, Move, Program
from lifecycle.checker.invariants import STATES, STEPS, state_invariants
from lifecycle.checker.steps import Invariant, Micro

#: Printed by the verifier once per resting state.
RESTING = "at rest"

_MOST_EFFECTS = 30  # of one move: ``pending`` has a bit for each

#: Needs a look at what is possible later from every state ("always possibly"), which no formula of Spin can say.
NOT_EXPRESSIBLE = frozenset(["way_home"])


def names_asked(program: Program) -> tuple[str, ...]:
    """Names of what the program's model can ask; ``broken`` is the place in this list, from 1."""
    states = [one.name for one in state_invariants(program)]
    return tuple(dict.fromkeys([*states, *(name for name in STEPS if name not in NOT_EXPRESSIBLE)]))


def forgets(program: Program) -> bool:
    """The machine is an actor's: after its end, and once its hooks are off, nothing is asked and all rests are one."""
    return any(one in STATES for one in state_invariants(program))


def promela(program: Program, invariant: str | None = None) -> str:
    """The model's text, the same for the same program. ``invariant``: ask this one alone, else all.

    Raises ValueError for an invariant that can not be asked.
    """
    names = names_asked(program)
    if invariant is not None and invariant not in names:
        why = "Spin can not express it" if invariant in NOT_EXPRESSIBLE else f"there are {', '.join(names)}"
        raise ValueError(f"the export can not ask for {invariant!r}: {why}")
    return "\n".join(_Model(program, invariant).lines()) + "\n"


# formulas


def fact(name: str) -> str:
    """A fact's variable: no keyword, and another one for each name."""
    return "f_" + re.sub(r"[^A-Za-z0-9]", lambda found: "__" if found[0] == "." else f"_{ord(found[0])}_", name)


def expression(expr: Expr) -> str:
    if isinstance(expr, Const):
        return "true" if expr.value else "false"
    if isinstance(expr, Bit):
        return fact(expr.name)
    if isinstance(expr, Not):
        return f"!({expression(expr.inner)})"
    assert isinstance(expr, And | Or)
    return "(" + (" && " if isinstance(expr, And) else " || ").join(map(expression, expr.parts)) + ")"


def assignments(sets: Sequence[Assignment]) -> list[str]:
    """All at once: what reads a fact that is assigned here too is computed first."""
    written = {name for name, _ in sets}
    first: list[str] = []
    then: list[str] = []
    for name, value in sets:
        if value == Bit(name):
            continue
        if bits_of(value) & written:
            first.append(f"t{len(first)} = {expression(value)}")
            then.append(f"{fact(name)} = t{len(first) - 1}")
        else:
            then.append(f"{fact(name)} = {expression(value)}")
    return [*first, *then]


def _option(guard: str, then: Iterable[str]) -> str:
    return f":: d_step {{ {guard} -> {'; '.join(then)} }}"


def _when(guard: str, then: str) -> str:
    return f"if :: {guard} -> {then} :: else fi"


# Spin bounds the number of statements in a d_step, so what depends on a number is one expression and no choice


def _every(cases: Sequence[str]) -> str:
    return " && ".join(cases) if cases else "true"


def _any(cases: Iterable[tuple[str, Expr]]) -> str:
    """Some case is at hand in which its formula is true."""
    found = [case if expr == TRUE else f"({case} && {expression(expr)})" for case, expr in cases if expr != FALSE]
    return f"({' || '.join(found)})" if found else "false"


def _chosen(cases: Sequence[tuple[str, int]]) -> str:
    """The number of the case at hand, 0 in any other. Cases with one number are tested together."""
    by_number: dict[int, list[str]] = {}
    for case, number in cases:
        by_number.setdefault(number, []).append(case)
    terms = [f"{number} * ({' || '.join(found)})" for number, found in by_number.items() if number]
    return " + ".join(terms) if terms else "0"


# the model


@define
class _Model:
    """Numbers what the text refers to. Bodies are micro-steps in order; equal ones are written once."""

    program: Program
    only: str | None
    flats: dict[str, int] = field(init=False)
    effects: dict[GroundEffect, int] = field(init=False, factory=dict)
    bodies: dict[tuple[Micro, ...], int] = field(init=False, factory=dict)  # to the number of its first micro-step
    invariants: tuple[Invariant, ...] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    _end: int = field(init=False, default=1)

    def __attrs_post_init__(self) -> None:
        self.flats = {flat: n for n, flat in enumerate(self.program.table.states)}
        self.invariants = state_invariants(self.program)
        self.names = names_asked(self.program)
        for effect in (effect for move in self.program.moves for effect in move.effects):
            if effect not in self.effects:
                self.effects[effect] = len(self.effects) + 1
                self._number(effect.micros)
                self._number(effect.inverse.micros if effect.inverse else ())
        assert all(len(move.effects) <= _MOST_EFFECTS for move in self.program.moves)

    def _number(self, body: tuple[Micro, ...]) -> None:
        if body not in self.bodies:
            self.bodies[body] = self._end
            self._end += len(body) + 1  # one more for its end

    def asks(self, name: str) -> bool:
        return self.only in (None, name)

    def broken(self, name: str, cases: Iterable[tuple[str, Expr]]) -> list[str]:
        """The statement that notes that the invariant is broken: where one of the formulas is not true in its case."""
        lacks = [(case, ~formula) for case, formula in cases if formula != TRUE] if self.asks(name) else []
        return [_when(f"!broken && {_any(lacks)}", f"broken = {self.names.index(name) + 1}")] if lacks else []

    def lines(self) -> Iterator[str]:
        yield f"/* {self.program.model.spec.name}: {self.only or 'all that can be asked'} */"
        yield from self._declarations()
        yield "active proctype machine() {"
        yield "do"
        yield ":: atomic {"
        yield "  if"
        yield "  :: !broken && mode == 0 ->"
        yield from self._resting()
        yield "  :: !broken && mode != 0 ->"
        yield from self._moment()
        yield "  fi;"
        yield from self._settle()
        for number, name in enumerate(self.names, 1):
            if self.asks(name):
                yield f"  assert(broken != {number}); /* {name} */"
        yield "}"
        yield "od"
        yield "}"

    def _declarations(self) -> Iterator[str]:
        for name in self.program.bits:
            yield f"bit {fact(name)} = {int(name in self.program.true_at_first)}; /* {name} */"
        yield f"byte flat = {self.flats[self.program.initial]};"
        yield from (f"/* flat {number}: {flat} */" for flat, number in self.flats.items())
        yield "byte mode; /* 0 rests, 1 forward, 2 unwinds */"
        yield "short move, at; /* what happens; the micro-step that is next */"
        yield "byte place; /* of the effect in its move */"
        yield "int pending; /* effects that began and have an inverse that did not run yet */"
        yield "bit committed, clean; /* past the point of no return; no inverse failed */"
        yield "byte broken;"
        yield "hidden byte did, failing, settled; hidden short eff;"
        ways = [way.sets for body in self.bodies for micro in body for way in micro.ways]
        most = max((len(sets) for sets in [*ways, *(move.sets for move in self.program.moves)]), default=0)
        yield from (f"hidden byte t{n};" for n in range(most))

    # choices

    def _resting(self) -> Iterator[str]:
        """What can begin; and once per resting state, that it is one, and what is asked of it."""
        yield "    if"
        yield f'    :: d_step {{ mode == 0 -> printf("{RESTING}\\n"); did = 0; failing = 0;'
        yield from (f"      {line};" for line in self._asked_at_rest())
        yield "    }"
        for number, move in enumerate(self.program.moves):
            begin = [f"move = {number}; mode = 1; did = {int(move.environment)}; failing = 0"]
            guard = f"flat == {self.flats[move.source]} && {expression(move.guard)}"
            yield f"    {_option(guard, [*assignments(move.sets), *begin])} /* {_title(move)} */"
        yield "    fi"

    def _moment(self) -> Iterator[str]:
        """How a micro-step may end. A machine that declares no fault promises that its inverses do not fail."""
        fails = "true" if self.program.faults else "mode == 1"
        yield "    if"
        yield f"    {_option(fails, ['did = 0; failing = 1'])}"
        for body, first in self.bodies.items():
            for number, micro in enumerate(body, first):
                for way in micro.ways:
                    guard = f"at == {number} && {expression(micro.succeeds & way.when)}"
                    done = [*assignments(way.sets), f"at = {number + 1}; did = 1"]
                    yield f"    {_option(guard, [*done, 'failing = 0'])}"
                    if micro.real:
                        yield f"    {_option(f'{fails} && {guard}', [*done, 'failing = 1'])}"
        yield "    fi"

    # what is asked

    def _invariants(self, moving: bool) -> Iterator[str]:
        states = self.program.table.states
        for one in self.invariants:
            if not (moving and one.at_rest):
                but_in = [f"flat != {n}" for flat, n in self.flats.items() if states[flat].name in one.but_in]
                yield from self.broken(one.name, [(_every(but_in), one.formula(self.program.words))])

    def _asked_at_rest(self) -> Iterator[str]:
        yield from self._invariants(moving=False)
        contracts = [(f"flat == {number}", self.program.contracts[flat]) for flat, number in self.flats.items()]
        yield from self.broken("contract_holds", contracts)

    def _asked_of_effects(self, name: str, formula: Callable[[GroundEffect], Expr]) -> str:
        cases = [(f"eff == {number}", formula(effect)) for effect, number in self.effects.items()]
        return "".join(f"{line}; " for line in self.broken(name, cases))

    # what follows

    def _settle(self) -> Iterator[str]:
        yield "  d_step {"
        yield "    if :: did -> skip;"
        yield from (f"      {line};" for line in self._invariants(moving=True))
        yield "    :: else fi;"
        yield "    if :: failing && mode == 1 -> mode = 2; clean = 1; at = 0"
        yield "    :: failing && mode == 2 -> clean = 0; at = 0 :: else fi;"
        yield "    settled = (mode == 0);"
        yield "    do"
        yield "    :: settled || broken -> break"
        yield "    :: else ->"
        yield from self._effect_here()
        yield "      if"
        yield from self._step()
        yield from self._begin()
        yield from self._unwind()
        yield "      fi"
        yield "    od;"
        yield "    eff = 0; did = 0; failing = 0; settled = 0"
        yield "  };"

    def _effect_here(self) -> Iterator[str]:
        """``eff``: the effect at this place of the move, 0 after the last."""
        plans: dict[tuple[GroundEffect, ...], list[str]] = {}
        for number, move in enumerate(self.program.moves):
            plans.setdefault(move.effects, []).append(f"move == {number}")
        yield "      if"
        for plan, moves in plans.items():
            found = _chosen([(f"place == {place}", self.effects[effect]) for place, effect in enumerate(plan)])
            yield f"      :: {' || '.join(moves)} -> eff = {found}"
        yield "      fi;"

    def _step(self) -> Iterator[str]:
        """Stops at a micro-step that has something to do. At the end of an effect, what it promised is asked."""
        micros = [(f"at == {n}", m) for body, first in self.bodies.items() for n, m in enumerate(body, first)]
        ends = [(f"at == {first + len(body)}", TRUE) for body, first in self.bodies.items()]
        yield f"      :: at != 0 && {_any(ends)} -> at = 0;"
        yield "        if :: mode == 1 -> "
        yield f"          {self._asked_of_effects('effect_keeps_its_word', lambda effect: effect.gives)}place++"
        yield "        :: else fi"
        yield f"      :: at != 0 && !{_any(ends)} ->"
        yield f"        if :: {_any((case, micro.when) for case, micro in micros)} -> settled = 1"
        for name in dict.fromkeys(micro.breaks for _, micro in micros):
            cases = [(case, micro.sound) for case, micro in micros if micro.breaks == name]
            yield from (f"          ; {line}" for line in self.broken(name, cases))
        yield "        :: else -> at++ fi"

    def _begin(self) -> Iterator[str]:
        effects = [(f"eff == {number}", effect) for effect, number in self.effects.items()]
        inverses = [(case, TRUE) for case, effect in effects if effect.inverse]
        final = [(case, TRUE) for case, effect in effects if not effect.undoable]
        targets = [(f"move == {n}", self.flats[move.target]) for n, move in enumerate(self.program.moves)]
        yield "      :: at == 0 && mode == 1 ->"
        yield "        if"
        yield f"        :: eff == 0 -> flat = {_chosen(targets)};"
        yield from self._rest()
        yield f"        :: eff != 0 && {_any((case, effect.work) for case, effect in effects)} ->"
        yield f"          {self._asked_of_effects('effect_needs_met', lambda effect: effect.needs)}"
        yield f"          {_when(_any(inverses), 'pending = pending | (1 << place)')};"
        yield f"          {_when(_any(final), 'committed = 1')};"
        yield f"          at = {_chosen([(case, self.bodies[effect.micros]) for case, effect in effects])}"
        yield "        :: else -> "
        yield f"          {self._asked_of_effects('effect_keeps_its_word', lambda effect: effect.gives)}place++"
        yield "        fi"

    def _unwind(self) -> Iterator[str]:
        faults = [(f"flat == {self.flats[one]}", self.flats[to]) for one, to in self.program.faults.items()]
        inverses = [(n, effect.inverse) for effect, n in self.effects.items() if effect.inverse]
        starts = [(f"eff == {n}", self.bodies[inverse.micros]) for n, inverse in inverses]
        yield "      :: at == 0 && mode == 2 ->"
        yield "        if"
        yield "        :: pending == 0 ->"
        if self.program.faults:
            yield "          if :: clean && !committed -> skip"
            yield f"          :: else -> if :: {_any((case, TRUE) for case, _ in faults)} -> flat = {_chosen(faults)}"
            yield f"            :: else -> broken = {self.names.index('fault_is_declared') + 1} fi"
            yield "          fi;"
        yield from self._rest()
        yield "        :: pending != 0 && (pending & (1 << place)) == 0 -> place--"
        yield "        :: pending != 0 && (pending & (1 << place)) != 0 ->"
        yield f"          pending = pending - (1 << place); at = {_chosen(starts)}"
        yield "        fi"

    def _rest(self) -> Iterator[str]:
        """What belongs to one event ends, and where the machine ``forgets``, all does."""
        program = self.program
        states = program.table.states
        finals = {state.name for state in program.model.spec.states if state.final}
        ended = [f"flat == {n}" for flat, n in self.flats.items() if states[flat].name in finals]
        yield "          " + "; ".join(f"{fact(name)} = 0" for name in program.words.local()) + ";"
        if forgets(program):
            ended.append(f"!{fact('hooks')}")
            everything = "; ".join(f"{fact(name)} = 0" for name in program.bits)
            yield f"          if :: {' || '.join(ended)} -> {everything} :: else fi;"
        yield "          mode = 0; move = 0; at = 0; place = 0; pending = 0; committed = 0; clean = 0; settled = 1"


def _title(move: Move) -> str:
    tag = f"({move.tag})" if move.tag else ""
    return f"{move.event}{tag}{', ' if move.note else ''}{move.note}: {move.source} -> {move.target}"


__all__ = ["NOT_EXPRESSIBLE", "RESTING", "names_asked", "promela"]
