"""One grounded program, compiled: how a move runs, and what is asked on the way.

[Note: frame] A move neither reads nor writes most bits, and does the same whatever they are. So what it leads to is
kept per value of the bits that matter to it (``RunMove.support``), and taken from there for states that differ in
others alone. Bits of an invariant matter to every move that writes one of them. This saves time and drops nothing;
``explore(..., keep=False)`` does without, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from attrs import define, field, frozen

from lifecycle.checker.formula import FALSE, TRUE, And, Expr, Not, all_of, assigned, bits_of, compiled, told
from lifecycle.checker.ground import GroundEffect, Move, Program, reads_and_writes
from lifecycle.checker.invariants import state_invariants
from lifecycle.checker.steps import Invariant, Micro
from lifecycle.checker.words import ACTOR, LOCAL, read_as

Test = Callable[[int], object]
Change = Callable[[int], int]
Node = tuple[int, int]  # flat state by number, bits
Path = tuple[object, ...] | None  # what happened so far, as nested pairs, where somebody wants to know


@frozen
class Broken(Exception):
    """An invariant that is broken, where, and by what."""

    name: str
    detail: str
    bits: int
    path: Path = None


@frozen
class RunMicro:
    """A micro-step, compiled. Tests that are always true are None."""

    when: Test | None
    succeeds: Test | None
    sound: Test | None
    breaks: str
    real: bool
    ways: tuple[tuple[Test | None, Change], ...]


@frozen
class RunEffect:
    name: str
    micros: tuple[RunMicro, ...]
    work: Test | None
    undoable: bool
    inverse: RunEffect | None
    needs: Test | None
    gives: Test | None
    ground: GroundEffect = field(repr=False)


@frozen
class RunMove:
    move: Move
    guard: Test | None
    begin: Change
    effects: tuple[RunEffect, ...]
    target: int
    support: int  # see [Note: frame]
    known: dict[int, tuple[tuple[int, int, bool], ...]] = field(factory=dict, repr=False, eq=False)


Undo = tuple[RunEffect, ...]  # inverses of the effects that have begun, in order
Config = tuple[int, Undo, bool]  # bits, inverses, whether a point of no return has been passed


@define
class Runner:
    """A program, compiled, and how one move runs. Holds no results."""

    program: Program
    index: Mapping[str, int] = field(init=False)
    flats: tuple[str, ...] = field(init=False)
    number: Mapping[str, int] = field(init=False)
    moves: tuple[tuple[RunMove, ...], ...] = field(init=False)  # per flat state
    invariants: tuple[Invariant, ...] = field(init=False)
    _sound: dict[str, Test] = field(init=False)  # per flat state: the invariants that are asked after every step
    _at_rest: tuple[Test, ...] = field(init=False)
    _kept: tuple[int, ...] = field(init=False)  # per flat state: bits that outlive an event that ends there
    _over: Test = field(init=False)
    _home: Test = field(init=False)
    _final: tuple[bool, ...] = field(init=False)
    _asked_of: int = field(init=False)  # all bits but those that others set, and those that only inverses read
    _own_business: int = field(init=False)  # facts of one event that contracts are about
    _cache: dict[object, Test | Change | RunEffect] = field(init=False, factory=dict)
    steps: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        program = self.program
        self.index = {name: n for n, name in enumerate(program.bits)}
        self.flats = tuple(program.table.states)
        self.number = {name: n for n, name in enumerate(self.flats)}
        self.invariants = state_invariants(program)
        local = sum(1 << self.index[name] for name in program.words.local())
        final = {state.name for state in program.model.spec.states if state.final}
        final = final if self._of_an_actor() else set()
        business = sum(1 << self.index[name] for name in LOCAL)
        self._own_business, self._asked_of = business, ~(local & ~business)
        self._final = tuple(program.table.states[flat].name in final for flat in self.flats)
        w = program.words
        home = all_of([w.shows(ACTOR), *(w(f"{region}.valid") for region in w.of.backups)]) | w("given_up")
        self._home = compiled(home, self.index)
        self._kept = tuple(0 if program.table.states[flat].name in final else ~local for flat in self.flats)
        self._over = compiled(~program.words("hooks") if self._of_an_actor() else FALSE, self.index)
        self._sound = {flat: compiled(self._asked(flat, moving=True), self.index) for flat in self.flats}
        self._at_rest = tuple(
            compiled(self._asked(flat, moving=False) & program.contracts[flat], self.index) for flat in self.flats
        )
        by_flat: dict[str, list[RunMove]] = {flat: [] for flat in self.flats}
        for move in program.moves:
            by_flat[move.source].append(self._move(move))
        self.moves = tuple(tuple(by_flat[flat]) for flat in self.flats)

    def first(self) -> Node:
        bits = sum(1 << self.index[name] for name in self.program.true_at_first)
        return self.number[self.program.initial], bits

    def _asked(self, flat: str, moving: bool) -> Expr:
        state = self.program.table.states[flat].name
        return all_of(
            one.formula(self.program.words)
            for one in self.invariants
            if state not in one.but_in and not (moving and one.at_rest)
        )

    # compiling

    def test(self, expr: Expr) -> Test | None:
        if expr == TRUE:
            return None
        found = self._cache.get(expr)
        if found is None:
            found = self._cache[expr] = compiled(expr, self.index)
        return found  # type: ignore[return-value]

    def _change(self, sets: Iterable[tuple[str, Expr]]) -> Change:
        key = tuple(sets)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = assigned(key, self.index)
        return found  # type: ignore[return-value]

    def _micro(self, micro: Micro) -> RunMicro:
        ways = tuple((self.test(way.when), self._change(way.sets)) for way in micro.ways)
        when, succeeds, sound = map(self.test, (micro.when, micro.succeeds, micro.sound))
        return RunMicro(when, succeeds, sound, micro.breaks, micro.real, ways)

    def _effect(self, effect: GroundEffect) -> RunEffect:
        found = self._cache.get(effect)
        if found is None:
            inverse = None if effect.inverse is None else self._effect(effect.inverse)
            micros = tuple(self._micro(micro) for micro in effect.micros)
            tests = (self.test(effect.needs), self.test(effect.gives))
            found = RunEffect(effect.name, micros, self.test(effect.work), effect.undoable, inverse, *tests, effect)
            self._cache[effect] = found
        return found  # type: ignore[return-value]

    def _move(self, move: Move) -> RunMove:
        effects = tuple(self._effect(effect) for effect in move.effects)
        change = self._change(move.sets)
        return RunMove(move, self.test(move.guard), change, effects, self.number[move.target], self._support(move))

    def _support(self, move: Move) -> int:
        reads, writes = reads_and_writes(move)
        found = set(reads | writes) | ({"hooks"} if self._of_an_actor() else set())  # with hooks off all facts end
        for one in self.invariants:
            formula = one.formula(self.program.words)
            for part in formula.parts if isinstance(formula, And) else (formula,):
                found |= bits_of(part) if bits_of(part) & writes else set()
        return sum(1 << self.index[name] for name in found)

    def ends(self, move: RunMove, bits: int, keep: bool = True) -> Iterator[Node]:
        """Where the move may end, by what is known of it or by running it. Raises Broken."""
        key = bits & move.support
        known = move.known.get(key) if keep else None
        if known is None:
            found = ((to, x & move.support, self.ended(to, x)) for to, x, _ in self.run(move, bits))
            known = move.known[key] = tuple(sorted(set(found)))
        frame = bits & ~move.support
        for to, x, over in known:
            yield to, 0 if over else frame | x

    def _of_an_actor(self) -> bool:
        return len(self.invariants) > len(self.program.model.invariants)

    def ended(self, flat: int, bits: int) -> bool:
        """Whether facts have ended there: see ``rest``."""
        return bits == 0 and (self._kept[flat] == 0 or self._of_an_actor())

    # running

    def check(self, move: RunMove, bits: int, path: Path = None) -> None:
        """The invariants that are asked after every step. Raises Broken."""
        if not self._sound[move.move.source](bits):
            raise self._which(move.move.source, bits, False, path)

    def rest(self, flat: int, bits: int, path: Path = None) -> Node:
        """Facts of one event end; what is asked at rest is asked.

        Once hooks are off nothing is asked any more and only ``close`` is left, so all such states count as one.
        """
        bits &= self._asked_of
        bits &= self._kept[flat] | self._own_business
        if self._over(bits):
            bits = 0
        if not self._at_rest[flat](bits):
            raise self._which(self.flats[flat], bits, True, path)
        bits &= self._kept[flat]
        return flat, bits

    def _which(self, flat: str, bits: int, at_rest: bool, path: Path) -> Broken:
        w, state = self.program.words, self.program.table.states[flat].name
        for one in self.invariants:
            asked = state not in one.but_in and (at_rest or not one.at_rest)
            if asked and not compiled(one.formula(w), self.index)(bits):
                return Broken(one.name, _lack(one.holds(w), self.index, bits), bits, path)
        detail = _lack(self.program.contracts[flat], self.index, bits)
        return Broken("contract_holds", f"{self.program.table.names[flat]}: {detail}", bits, path)

    def run(self, move: RunMove, bits: int, path: Path = None) -> set[tuple[int, int, Path]]:
        """Every resting state that the move may end in. Raises Broken. ``path`` other than None is extended."""
        start = move.begin(bits)
        if move.move.environment:
            self.steps += 1
            self.check(move, start, path)
            return {(*self.rest(move.target, start, path), path)}
        ended: set[tuple[int, int, Path]] = set()
        marched = self._march(move, [(start, (), False, path)], 0, len(move.effects), ended)
        return ended | {(*self.arrive(move, x, way), way) for x, _, _, way in marched}

    def arrive(self, move: RunMove, bits: int, path: Path = None) -> Node:
        """At the target. Where a life cycle ends the device must show the actor, whatever the row did on the way."""
        source = self.number[move.move.source]
        if self._final[move.target] and not self._final[source] and not self._home(bits):
            raise Broken("close_brings_home", self.flats[move.target], bits, path)
        return self.rest(move.target, bits, path)

    def march(self, move: RunMove, configs: Iterable[Config], first: int, last: int, failed: set[Node]) -> list[Config]:
        """Run some of the move's effects: what they may come to, and into ``failed`` where a failure of them leads."""
        ended: set[tuple[int, int, Path]] = set()
        marched = self._march(move, [(*config, None) for config in configs], first, last, ended)
        failed |= {(flat, bits) for flat, bits, _ in ended}
        return [(x, undo, committed) for x, undo, committed, _ in marched]

    def unwind(self, move: RunMove, x: int, undo: Undo, committed: bool) -> set[Node]:
        """Where it leads to stop here."""
        return {(flat, bits) for flat, bits, _ in self._unwound(move, x, undo, committed, None)}

    def _march(
        self,
        move: RunMove,
        configs: list[tuple[int, Undo, bool, Path]],
        first: int,
        last: int,
        ended: set[tuple[int, int, Path]],
    ) -> list[tuple[int, Undo, bool, Path]]:
        seen: set[tuple[int, Undo, bool]] = set()

        def fail(undo: Undo, committed: bool, x: int, way: Path) -> None:
            if way is None:  # nobody wants to know how it came, so once is enough
                if (x, undo, committed) in seen:
                    return
                seen.add((x, undo, committed))
            ended.update(self._unwound(move, x, undo, committed, way))

        todo = [(first, *config) for config in configs]
        marched = []
        while todo:
            place, x, undo, committed, way = todo.pop()
            if place == last:
                marched.append((x, undo, committed, way))
                continue
            effect = move.effects[place]
            if effect.work is None or effect.work(x):
                if effect.needs is not None and not effect.needs(x):
                    raise self._unmet(effect, x, way)
                committed = committed or not effect.undoable
                undo = undo if effect.inverse is None else (*undo, effect.inverse)
                stop = partial(fail, undo, committed)
                for after, further in self._forward(move, effect, x, way, stop):
                    self._keeps_word(effect, after, further)
                    todo.append((place + 1, after, undo, committed, further))
            else:
                self._keeps_word(effect, x, way)
                todo.append((place + 1, x, undo, committed, way))
        return marched

    def _forward(
        self, move: RunMove, effect: RunEffect, x: int, way: Path, fail: Callable[[int, Path], None]
    ) -> Iterator[tuple[int, Path]]:
        """Every way through the effect's micro-steps; ``fail`` is told of each point at which it may stop."""
        todo = [(0, x)]
        while todo:
            place, y = todo.pop()
            if place == len(effect.micros):
                yield y, way and (way, effect.name, "done", y)
                continue
            micro = effect.micros[place]
            if micro.when is not None and not micro.when(y):
                todo.append((place + 1, y))
                continue
            failed = way and (way, effect.name, "failed", y)
            if micro.sound is not None and not micro.sound(y):
                raise Broken(micro.breaks, f"in effect {effect.name}", y, failed)
            fail(y, failed)
            if micro.succeeds is not None and not micro.succeeds(y):
                continue
            for possible, change in micro.ways:
                if possible is None or possible(y):
                    self.steps += 1
                    z = change(y)
                    done = way and (way, effect.name, "failed", z)
                    self.check(move, z, done)
                    if micro.real:
                        fail(z, done)
                    todo.append((place + 1, z))

    def _unwound(
        self, move: RunMove, x: int, undo: Undo, committed: bool, way: Path
    ) -> Iterator[tuple[int, int, Path]]:
        """Where a failure may lead: all undone, or a fault.

        A machine that declares no fault has nowhere to go from an inverse that fails: it promises that none does.
        """
        configs: set[tuple[int, bool, Path]] = {(x, True, way)}
        for inverse in reversed(undo):
            further: set[tuple[int, bool, Path]] = set()
            for y, clean, p in configs:
                if inverse.work is not None and not inverse.work(y):
                    further.add((y, clean, p))
                    continue

                def stop(z: int, q: Path, found: set[tuple[int, bool, Path]] = further) -> None:
                    if self.program.faults:
                        found.add((z, False, q))

                for z, q in self._forward(move, inverse, y, p, stop):
                    further.add((z, clean, q and (p, inverse.name, "undone", z)))
            configs = further
        source = move.move.source
        for y, clean, p in configs:
            if clean and not committed:
                yield (*self.rest(self.number[source], y, p), p)
            else:
                yield (*self.rest(self._fault(source, y, p), y, p), p)

    def _fault(self, source: str, bits: int, path: Path) -> int:
        """A machine that declares no fault at all stays where it was, with what has been done."""
        to = self.program.faults.get(source) if self.program.faults else source
        if to is None:
            raise Broken("fault_is_declared", f"from {source}", bits, path)
        return self.number[to]

    def _unmet(self, effect: RunEffect, bits: int, path: Path) -> Broken:
        unmet = next(text for text, expr in effect.ground.unmet if not compiled(expr, self.index)(bits))
        where = path and (path, effect.name, "failed", bits)
        return Broken("effect_needs_met", f"{effect.name} {unmet}", bits, where)

    def _keeps_word(self, effect: RunEffect, bits: int, path: Path) -> None:
        if effect.gives is not None and not effect.gives(bits):
            detail = f"{effect.name}: {_lack(effect.ground.gives, self.index, bits)}"
            raise Broken("effect_keeps_its_word", detail, bits, path)


def _lack(expr: Expr, index: Mapping[str, int], bits: int) -> str:
    """The parts of a conjunction that are not true, in words."""
    parts = expr.parts if isinstance(expr, And) else (expr,)
    wrong = [part for part in parts if not compiled(part, index)(bits)]
    return "; ".join(
        f"true: {told(part.inner, read_as)}" if isinstance(part, Not) else f"not true: {told(part, read_as)}"
        for part in wrong[:3]
    )
