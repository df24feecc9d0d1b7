"""Several ranks of one machine: every event on all of them, any of them failing anywhere.

Theory of operation. A state is one resting state per rank. An event is asked of every rank at once. Up to the place
where they agree, a rank that refuses or fails makes all the others undo; behind it, a rank that fails takes all the
others to its fault (``states.joint.RankRules``). A choice that the rules call common is made once: a fact that is true
on any rank counts on all. The environment does the same on every rank. At most ``failures`` ranks fail by themselves in
one event; the others only follow.

[Note: ranks] What one rank does in one event depends on its own facts alone, so its possible ends are computed once per
value of the facts that matter to the move (see [Note: frame] in ``runner``) and then combined. States that differ only
in which rank is which are one (``symmetric``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

from attrs import asdict, define, field, frozen

from lifecycle.checker.ground import Model, ground
from lifecycle.checker.invariants import reason
from lifecycle.checker.runner import Broken, Node, RunMove, Runner
from lifecycle.checker.trace import Step, Trace
from states.joint import RANK_RULES, RankRules

Ranked = tuple[Node, ...]
Ends = tuple[tuple[int, int, bool], ...]  # flat state, bits that matter to the move, whether all facts have ended

WHY = (
    "Ranks rest in different states, or disagree about an open phase or load: the next collective hangs, or one rank "
    "trains what another has not (https://github.com/radixark/miles/issues/384)."
)


@frozen
class Phases:
    """What one rank may come to: before the meeting, by its own failure or another's; behind it, done or failed."""

    failed: Ends
    unwound: Ends
    done: Ends
    broken_off: Ends


@define
class RankRunner:
    """Runs the moves of one rank in two halves."""

    runner: Runner
    _known: dict[tuple[int, int], Phases] = field(factory=dict)

    def phases(self, move: RunMove, bits: int) -> Phases:
        key = (id(move), bits & move.support)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._run(move, bits)
        return found

    def _run(self, move: RunMove, bits: int) -> Phases:
        runner, place = self.runner, move.move.agreed_at
        failed: set[Node] = set()
        ready = runner.march(move, [(move.begin(bits), (), False)], 0, place, failed)
        unwound: set[Node] = set()
        for config in ready:
            unwound |= runner.unwind(move, *config)
        broken_off: set[Node] = set()
        ended = runner.march(move, ready, place, len(move.effects), broken_off)
        done = {runner.arrive(move, x) for x, _, _ in ended}
        return Phases(*(self._kept(move, ends) for ends in (failed, unwound, done, broken_off)))

    def _kept(self, move: RunMove, ends: set[Node]) -> Ends:
        return tuple((flat, bits & move.support, self.runner.ended(flat, bits)) for flat, bits in sorted(ends))


@frozen
class RankedReport:
    """``states`` are of all ranks together. ``failures``: how many ranks fail by themselves in one event, at most."""

    machine: str
    ranks: int
    failures: int
    symmetric: bool
    complete: bool
    states: int
    moves: int
    seconds: float
    findings: tuple[Trace, ...]

    def to_plain(self) -> dict[str, Any]:
        """For programs."""
        plain = asdict(self, filter=lambda attribute, _: attribute.name != "findings")
        return {**plain, "findings": [trace.to_plain() for trace in self.findings]}


@define
class Ranks:
    """Explores ``size`` ranks of one model under the rules."""

    model: Model
    size: int = 2
    rules: RankRules = RANK_RULES
    failures: int = 1
    symmetric: bool = True
    runner: Runner = field(init=False)
    _rank: RankRunner = field(init=False)
    _agreed_bits: int = field(init=False)
    _by_event: list[dict[tuple[str, str | None, str], list[RunMove]]] = field(init=False)
    _asking: str = field(init=False, default="")

    def __attrs_post_init__(self) -> None:
        if self.model.joint is not None:
            raise ValueError("ranks of an actor with engines on its device are not explored together: check each alone")
        if not any(event.name == self.rules.spread for event in self.model.spec.events):
            raise ValueError(
                f"machine {self.model.spec.name!r} has no event {self.rules.spread!r}, so no rules for ranks"
            )
        program = ground(self.model, self.rules.together)
        self.runner = Runner(program)
        self._rank = RankRunner(self.runner)
        names = ["working", *(f"loading.{tag}" for tag in program.model.instance.all_tags)]
        self._agreed_bits = sum(1 << self.runner.index[name] for name in names)
        self._by_event = []
        for moves in self.runner.moves:
            named: dict[tuple[str, str | None, str], list[RunMove]] = {}
            for move in moves:
                named.setdefault((move.move.event, move.move.tag, move.move.note), []).append(move)
            self._by_event.append(named)

    def explore(
        self, limit: int | None = None, progress: Callable[[int, int, int], None] | None = None
    ) -> RankedReport:
        """Breadth first, up to the first finding."""
        began = time.perf_counter()
        first: Ranked = (self.runner.first(),) * self.size
        parents: dict[Ranked, tuple[Ranked, str] | None] = {first: None}
        findings: list[Trace] = []
        layer, moves, complete = [first], 0, True
        while layer and not findings and complete:
            following: list[Ranked] = []
            for ranked in layer:
                try:
                    for event, end in self._ends(ranked):
                        moves += 1
                        if end not in parents:
                            parents[end] = (ranked, event)
                            self._agree(end)
                            following.append(end)
                except Broken as broken:
                    place = end if broken.name == "ranks_agree" else ranked
                    findings.append(self._trace(parents, place, broken))
                    break
                if limit is not None and len(parents) > limit:
                    complete = False
                    break
            if progress is not None:
                progress(len(parents), len(following), self.runner.steps)
            layer = following
        seconds = time.perf_counter() - began
        told = (self.model.spec.name, self.size, self.failures, self.symmetric, complete)
        return RankedReport(*told, len(parents), moves, seconds, tuple(findings))

    def _ends(self, ranked: Ranked) -> Iterator[tuple[str, Ranked]]:
        """Every state of all ranks that one event or one move of the environment may lead to, with its name."""
        asked = dict.fromkeys(name for flat, _ in ranked for name in self._by_event[flat])
        for name in asked:
            options = [self._allowed(rank, name) for rank in ranked]
            found = [moves[0] for moves in options if moves]
            if not found:
                continue
            ends = self._environment if found[0].move.environment else self._event
            label = self._asking = f"{name[0]}({name[1]})" if name[1] else name[0]
            for end in ends(ranked, options):
                yield label, tuple(sorted(end)) if self.symmetric else end

    def _allowed(self, rank: Node, name: tuple[str, str | None, str]) -> list[RunMove]:
        flat, bits = rank
        moves = self._by_event[flat].get(name, ())
        return [move for move in moves if move.guard is None or move.guard(bits)]

    def _environment(self, ranked: Ranked, options: list[list[RunMove]]) -> Iterator[Ranked]:
        yield tuple(
            next(iter(self.runner.ends(moves[0], rank[1]))) if moves else rank
            for rank, moves in zip(ranked, options, strict=True)
        )

    def _event(self, ranked: Ranked, options: list[list[RunMove]]) -> Iterator[Ranked]:
        refused: list[list[RunMove | None]] = [list(moves) or [None] for moves in options]
        for moves in product(*refused):
            if self._together(ranked, moves):
                yield from self._asked(ranked, moves)

    def _together(self, ranked: Ranked, moves: tuple[RunMove | None, ...]) -> bool:
        """Whether these rows are what the common choice says."""
        for move in (move for move in moves if move is not None):
            for expr, value in move.move.together:
                test = self.runner.test(expr)
                if any(test is None or test(bits) for _, bits in ranked) != value:
                    return False
        return True

    def _asked(self, ranked: Ranked, moves: tuple[RunMove | None, ...]) -> Iterator[Ranked]:
        meeting = {move.move.meets for move in moves if move is not None}
        if len(meeting) > 1:
            raise Broken("ranks_agree", f"{self._asking}: some ranks meet, and others have a row that does not", 0)
        halves = [self._halves(rank, move) for rank, move in zip(ranked, moves, strict=True)]
        everyone = range(self.size)
        if all(move is not None for move in moves):
            yield from product(*(done for _, _, done, _ in halves))
            for count in range(1, self.failures + 1):
                for failing in combinations(everyone, count):
                    before = [halves[n][0] if n in failing else halves[n][1] for n in everyone]
                    yield from (self._spread(end) for end in product(*before))
                    behind = [halves[n][3] if n in failing else halves[n][2] for n in everyone]
                    yield from (self._all_faulted(ranked, end) for end in product(*behind))
        else:
            yield from (self._spread(end) for end in product(*(unwound for _, unwound, _, _ in halves)))

    def _halves(self, rank: Node, move: RunMove | None) -> tuple[list[Node], ...]:
        if move is None:
            return [rank], [rank], [rank], []
        found = self._rank.phases(move, rank[1])
        frame = rank[1] & ~move.support
        ends = (found.failed, found.unwound, found.done, found.broken_off)
        return tuple([(flat, 0 if over else frame | x) for flat, x, over in some] for some in ends)

    def _spread(self, end: tuple[Node, ...]) -> Ranked:
        faulted = [flat for flat, _ in end if self.runner.flats[flat] in self.runner.program.faults.values()]
        return end if not faulted else self._all_faulted(end, end)

    def _all_faulted(self, before: Ranked, end: tuple[Node, ...]) -> Ranked:
        """Whatever each has come to, all are in the fault state that the table names."""
        faults, flats, number = self.runner.program.faults, self.runner.flats, self.runner.number
        target = next(faults[flats[flat]] for flat, _ in (*before, *end) if flats[flat] in faults)
        return tuple(self.runner.rest(number[target], bits) for _, bits in end)

    def _agree(self, ranked: Ranked) -> None:
        flats = {flat for flat, _ in ranked}
        faulted = all(self.runner.flats[flat] in self.runner.program.faults.values() for flat in flats)
        open_business = {bits & self._agreed_bits for _, bits in ranked}
        if len(flats) > 1 or (len(open_business) > 1 and not faulted):
            names = " and ".join(self.runner.program.table.names[self.runner.flats[flat]] for flat, _ in ranked)
            raise Broken("ranks_agree", names, 0)
        for rank in ranked:
            self.runner.rest(*rank)

    def _trace(self, parents: Mapping[Ranked, tuple[Ranked, str] | None], ranked: Ranked, broken: Broken) -> Trace:
        steps: list[Step] = []
        if broken.name != "ranks_agree" or "meet" in broken.detail:  # it breaks inside the event that was asked last
            steps.append(Step(self._asking, None, self._named(ranked), self._named(ranked), "stopped"))
        while (parent := parents[ranked]) is not None:
            before, event = parent
            steps.append(Step(event, None, self._named(before), self._named(ranked), "done"))
            ranked = before
        program = self.runner.program
        why = WHY if broken.name == "ranks_agree" else reason(program, broken.name)
        tags = program.model.instance.all_tags
        return Trace(program.model.spec.name, broken.name, why, broken.detail, tags, tuple(reversed(steps)))

    def _named(self, ranked: Ranked) -> str:
        return " | ".join(self.runner.program.table.names[self.runner.flats[flat]] for flat, _ in ranked)
