"""Exhaustive exploration: every event in every reachable state, every effect failing or not, every inverse too.

Theory of operation. A resting state is a flat state and an integer of bits. From each, every move whose guard is
true is run to its end in every possible way: the effects go forward micro-step by micro-step, and before the first,
between any two and after the last, a failure branches off, which unwinds the inverses (each failing or not) and ends
back at the source or in a fault state. Resting states are stored and explored breadth first, so the first way found
to break an invariant has the fewest events. Nothing is sampled and nothing is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from attrs import define, field, frozen

from lifecycle.checker.ground import Program
from lifecycle.checker.runner import Broken, Node, RunMove, Runner


@frozen
class Found:
    """What an exploration has seen. ``broken``: per invariant the node and move that first broke it."""

    runner: Runner
    parents: Mapping[Node, Node | None]
    moves: int
    steps: int
    seconds: float
    broken: Mapping[str, tuple[Node, RunMove | None, Broken]]
    complete: bool


Canonical = Callable[[Node], Node]


def explore(
    program: Program,
    canonical: Canonical | None = None,
    stop_at_first: bool = True,
    limit: int | None = None,
    keep: bool = True,
    variants: Callable[[Node], Iterable[Node]] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Found:
    """Breadth first over resting states. ``canonical`` maps a state to the one that stands for it and its likes, and
    ``variants`` to those of them that are run in its place.

    ``progress`` is told now and then how many states are known, how many wait, and how many steps were taken.
    """
    search = _Search(Runner(program), canonical or _itself, variants or _alone, stop_at_first, keep)
    began = time.perf_counter()
    complete = search.run(limit, progress)
    seconds = time.perf_counter() - began
    complete = complete and not search.broken  # behind what is broken nobody has looked
    runner = search.runner
    return Found(runner, search.parents, search.moves, runner.steps, seconds, search.broken, complete)


def _itself(node: Node) -> Node:
    return node


def _alone(node: Node) -> tuple[Node, ...]:
    return (node,)


@define
class _Search:
    """One search: what it knows so far."""

    runner: Runner
    canonical: Canonical
    variants: Callable[[Node], Iterable[Node]]
    stop_at_first: bool
    keep: bool
    parents: dict[Node, Node | None] = field(factory=dict)
    broken: dict[str, tuple[Node, RunMove | None, Broken]] = field(factory=dict)
    onward: dict[Node, set[Node]] = field(factory=dict)  # of states that are no home: where they lead
    moves: int = 0

    def run(self, limit: int | None, progress: Callable[[int, int, int], None] | None) -> bool:
        """Whether it came to its end."""
        runner = self.runner
        homes = {runner.number[flat] for flat in runner.program.homes}
        first = runner.first()
        self.parents[first] = None
        try:
            runner.rest(*first)
        except Broken as found:
            self.broken[found.name] = (first, None, found)
        layer = [first]
        while layer and not self._enough():
            following: list[Node] = []
            for node in layer:
                ends = self._ends_of(node, following)
                if node[0] not in homes:
                    self.onward[node] = ends
                if self._enough():
                    break
                if limit is not None and len(self.parents) > limit:
                    return False
            if progress is not None:
                progress(len(self.parents), len(following), runner.steps)
            layer = following
        if not self.broken:
            self._look_for_a_way_home(homes)
        return True

    def _enough(self) -> bool:
        return bool(self.broken) and self.stop_at_first

    def _ends_of(self, node: Node, following: list[Node]) -> set[Node]:
        """Every state that one move leads to; new ones are noted, to be explored next."""
        reached: set[Node] = set()
        for flat, bits in self.variants(node):
            for move in self.runner.moves[flat]:
                if move.guard is not None and not move.guard(bits):
                    continue
                self.moves += 1
                try:
                    for found in self.runner.ends(move, bits, self.keep):
                        end = self.canonical(found)
                        reached.add(end)
                        if end not in self.parents:
                            self.runner.rest(*end)
                            self.parents[end] = node
                            following.append(end)
                except Broken as broken:
                    self.broken.setdefault(broken.name, (node, move, broken))
                    if self.stop_at_first:
                        return reached
        return reached

    def _look_for_a_way_home(self, homes: set[int]) -> None:
        for node in _no_way_home(self.onward, homes)[:1]:
            name = self.runner.program.table.names[self.runner.flats[node[0]]]
            self.broken["way_home"] = (node, None, Broken("way_home", name, node[1]))


def _no_way_home(onward: Mapping[Node, set[Node]], homes: set[int]) -> list[Node]:
    """States from which no sequence of moves leads to a home state, in the order in which they were found."""
    back: dict[Node, list[Node]] = {}
    good: list[Node] = []
    for node, ends in onward.items():
        if any(end[0] in homes for end in ends):
            good.append(node)
        for end in ends:
            back.setdefault(end, []).append(node)
    reached = set(good)
    while good:
        for node in back.get(good.pop(), ()):
            if node not in reached:
                reached.add(node)
                good.append(node)
    return [node for node in onward if node not in reached]
