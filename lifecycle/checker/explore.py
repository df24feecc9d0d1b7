"""Exhaustive exploration: every event in every reachable state, every effect failing or not, every inverse too.

Theory of operation. A resting state is a flat state and an integer of bits. From each, every move whose guard is
true is run to its end in every possible way: the effects go forward micro-step by micro-step, and before the first,
between any two and after the last, a failure branches off, which unwinds the inverses (each failing or not) and ends
back at the source or in a fault state. Resting states are stored and explored breadth first, so the first way found
to break an invariant has the fewest events. Nothing is sampled and nothing is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from attrs import frozen

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
    progress: Callable[[int, int, int], None] | None = None,
) -> Found:
    """Breadth first over resting states. ``canonical`` maps a state to the one that stands for it and its likes.

    ``progress`` is told now and then how many states are known, how many wait, and how many steps were taken.
    """
    runner = Runner(program)
    began = time.perf_counter()
    broken: dict[str, tuple[Node, RunMove | None, Broken]] = {}
    first = runner.first()
    parents: dict[Node, Node | None] = {first: None}
    stuck: dict[Node, set[Node]] = {}
    homes = {runner.number[flat] for flat in program.homes}
    layer, moves, complete = [first], 0, True
    try:
        runner.rest(*first)
    except Broken as found:
        broken[found.name] = (first, None, found)
    while layer and complete and not (broken and stop_at_first):
        following: list[Node] = []
        for node in layer:
            flat, bits = node
            onward: set[Node] | None = None if flat in homes else set()
            for move in runner.moves[flat]:
                if move.guard is not None and not move.guard(bits):
                    continue
                moves += 1
                try:
                    for end in runner.ends(move, bits, keep):
                        if canonical is not None:
                            end = canonical(end)
                        if onward is not None:
                            onward.add(end)
                        if end not in parents:
                            runner.rest(*end)
                            parents[end] = node
                            following.append(end)
                except Broken as found:
                    broken.setdefault(found.name, (node, move, found))
                    if stop_at_first:
                        break
            if onward is not None:
                stuck[node] = onward
            if broken and stop_at_first:
                break
            if limit is not None and len(parents) > limit:
                complete = False
                break
        if progress is not None:
            progress(len(parents), len(following), runner.steps)
        layer = following
    if complete and not broken:
        for node in _no_way_home(stuck, homes):
            broken["way_home"] = (node, None, Broken("way_home", program.table.names[runner.flats[node[0]]], node[1]))
            break
    seconds = time.perf_counter() - began
    return Found(runner, parents, moves, runner.steps, seconds, broken, complete)


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
