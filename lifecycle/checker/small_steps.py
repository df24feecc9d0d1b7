"""Every state that the Promela export has, counted by a plain search: an event's every moment is a state of its own.

Written from the description of how an event runs and not from ``explore``: that runs an event to its end at once, this
knows nothing but single steps. It is slow and exists to compare counts with Spin and with ``explore``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import define, evolve, field, frozen

from lifecycle.checker.formula import Expr, assigned, compiled
from lifecycle.checker.ground import GroundEffect, Program
from lifecycle.checker.promela import forgets
from lifecycle.checker.steps import Micro, Way


@frozen
class Moment:
    """Where the machine is. ``move`` is None at rest; ``pending``: places of effects whose inverse has yet to run."""

    flat: str
    bits: int
    move: int | None = None
    place: int = 0
    micro: int = 0
    unwinds: bool = False
    pending: frozenset[int] = frozenset()
    committed: bool = False
    clean: bool = False


@frozen
class Counts:
    """``states`` are all of them, ``resting`` those between two events."""

    states: int
    resting: int


def count(program: Program) -> Counts:
    """Of a machine that breaks nothing: what is asked of it is not looked at here."""
    steps = _Steps(program)
    todo = [Moment(program.initial, sum(1 << steps.index[name] for name in program.true_at_first))]
    seen = set(todo)
    while todo:
        for moment in steps.after(todo.pop()):
            if moment not in seen:
                seen.add(moment)
                todo.append(moment)
    return Counts(len(seen), sum(1 for moment in seen if moment.move is None))


@define
class _Steps:
    program: Program
    index: dict[str, int] = field(init=False)
    _local: int = field(init=False)
    _final: frozenset[str] = field(init=False)
    _forgets: bool = field(init=False)
    _tests: dict[int, tuple[object, Callable[[int], object]]] = field(init=False, factory=dict)
    _changes: dict[int, tuple[object, Callable[[int], int]]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        program = self.program
        self.index = {name: n for n, name in enumerate(program.bits)}
        self._local = sum(1 << self.index[name] for name in program.words.local())
        finals = {state.name for state in program.model.spec.states if state.final}
        self._final = frozenset(flat for flat, state in program.table.states.items() if state.name in finals)
        self._forgets = forgets(program)

    # formulas are compiled once per object: equal ones are many, and hashing them costs more than running them

    def _is(self, expr: Expr, bits: int) -> bool:
        found = self._tests.get(id(expr))
        if found is None:
            found = self._tests[id(expr)] = (expr, compiled(expr, self.index))
        return bool(found[1](bits))

    def _does(self, way: Way, bits: int) -> int:
        found = self._changes.get(id(way))
        if found is None:
            found = self._changes[id(way)] = (way, assigned(way.sets, self.index))
        return found[1](bits)

    def _works(self, effect: GroundEffect, bits: int) -> bool:
        return any(self._is(micro.when, bits) for micro in effect.micros)

    def after(self, now: Moment) -> Iterator[Moment]:
        """Everything that can be next."""
        if now.move is None:
            yield from self._begun(now)
            return
        micro = self._body(now)[now.micro]
        may_fail = not now.unwinds or bool(self.program.faults)  # without faults, inverses are promised not to fail
        if may_fail:
            yield self._failed(now)
        if not self._is(micro.succeeds, now.bits):
            return
        for way in micro.ways:
            if self._is(way.when, now.bits):
                done = evolve(now, bits=self._does(way, now.bits), micro=now.micro + 1)
                yield self._settled(done)
                if micro.real and may_fail:
                    yield self._failed(done)

    def _begun(self, now: Moment) -> Iterator[Moment]:
        for number, move in enumerate(self.program.moves):
            if move.source == now.flat and self._is(move.guard, now.bits):
                bits = assigned(move.sets, self.index)(now.bits)
                if move.environment:
                    yield self._rest(move.target, bits)
                else:
                    yield self._forward(evolve(now, bits=bits, move=number))

    def _body(self, now: Moment) -> tuple[Micro, ...]:
        effect = self._effects(now)[now.place]
        if now.unwinds:
            assert effect.inverse is not None
            return effect.inverse.micros
        return effect.micros

    def _effects(self, now: Moment) -> tuple[GroundEffect, ...]:
        assert now.move is not None
        return self.program.moves[now.move].effects

    def _failed(self, now: Moment) -> Moment:
        return self._unwound(evolve(now, unwinds=True, clean=not now.unwinds, micro=0))

    def _settled(self, now: Moment) -> Moment:
        """The next micro-step of this effect that has something to do, or what follows the effect."""
        body = self._body(now)
        for micro in range(now.micro, len(body)):
            if self._is(body[micro].when, now.bits):
                return evolve(now, micro=micro)
        if now.unwinds:
            return self._unwound(evolve(now, micro=0))
        return self._forward(evolve(now, place=now.place + 1, micro=0))

    def _forward(self, now: Moment) -> Moment:
        for place in range(now.place, len(self._effects(now))):
            effect = self._effects(now)[place]
            if self._works(effect, now.bits):
                pending = now.pending | {place} if effect.inverse else now.pending
                committed = now.committed or not effect.undoable
                return self._settled(evolve(now, place=place, pending=pending, committed=committed))
        assert now.move is not None
        return self._rest(self.program.moves[now.move].target, now.bits)

    def _unwound(self, now: Moment) -> Moment:
        for place in sorted(now.pending, reverse=True):
            now = evolve(now, place=place, pending=now.pending - {place})
            inverse = self._effects(now)[place].inverse
            assert inverse is not None
            if self._works(inverse, now.bits):
                return self._settled(now)
        kept = (now.clean and not now.committed) or not self.program.faults
        return self._rest(now.flat if kept else self.program.faults[now.flat], now.bits)

    def _rest(self, flat: str, bits: int) -> Moment:
        over = self._forgets and (flat in self._final or not bits >> self.index["hooks"] & 1)
        return Moment(flat, 0 if over else bits & ~self._local)


__all__ = ["Counts", "Moment", "count"]
