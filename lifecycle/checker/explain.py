"""From what an exploration found to a trace that a person can follow."""

from __future__ import annotations

from typing import Any

from lifecycle.checker.explore import Found
from lifecycle.checker.ground import Model
from lifecycle.checker.invariants import reason
from lifecycle.checker.runner import Broken, Node, Path, RunMove, Runner
from lifecycle.checker.trace import Change, Step, Trace, TraceEffect
from lifecycle.checker.words import read_as

_START: Path = ("start",)


def traces(found: Found) -> tuple[Trace, ...]:
    """One trace per broken invariant, with the fewest events that lead there."""
    return tuple(_trace(found, name, *place) for name, place in found.broken.items())


def _trace(found: Found, name: str, node: Node, move: RunMove | None, broken: Broken) -> Trace:
    runner, nodes = found.runner, [node]
    while (parent := found.parents[nodes[-1]]) is not None:
        nodes.append(parent)
    steps: list[Step] = []
    here = runner.first()
    for target in reversed(nodes[:-1]):
        step, here = _step_to(runner, here, target)
        steps.append(step)
    if move is not None:
        steps.append(_last(runner, here, move, name))
    program = runner.program
    return Trace(
        program.model.spec.name,
        name,
        reason(program, name),
        broken.detail,
        program.model.instance.all_tags,
        tuple(steps),
    )


def _name(model: Model) -> str:
    return model.spec.name if model.joint is None else model.joint.name


def _step_to(runner: Runner, here: Node, target: Node) -> tuple[Step, Node]:
    """The move from here to the target, by the fewest effects."""
    for move in runner.moves[here[0]]:
        if move.guard is not None and not move.guard(here[1]):
            continue
        try:
            ends = runner.run(move, here[1], _START)
        except Broken:
            continue
        for flat, bits, path in sorted(ends, key=lambda end: _length(end[2])):
            end = (flat, bits)
            if end == target:
                return _step(runner, here, move, path, flat, bits), end
    raise AssertionError(f"no move leads from {here} to {target}")


def _length(path: Path) -> int:
    return len(_flat(path))


def _last(runner: Runner, here: Node, move: RunMove, name: str) -> Step:
    """The move in which the invariant breaks."""
    try:
        runner.run(move, here[1], _START)
    except Broken as broken:
        if broken.name == name:
            return _step(runner, here, move, broken.path, None, broken.bits)
    raise AssertionError(f"{name} does not break in {move.move.event}")


def _flat(path: Path) -> list[tuple[str, str, int]]:
    """What happened, in order: effect, outcome, bits after it."""
    entries: list[tuple[str, str, int]] = []
    place: Any = path
    while place is not None and len(place) == 4:
        place, *entry = place
        entries.append((entry[0], entry[1], entry[2]))
    return entries[::-1]


def _step(runner: Runner, here: Node, move: RunMove, path: Path, flat: int | None, bits: int) -> Step:
    names, before = runner.program.table.names, here[1]
    effects = []
    for name, outcome, after in _flat(path):
        effects.append(TraceEffect(name, outcome, _changes(runner, before, after)))
        before = after
    if move.move.environment or flat is None:
        last = _changes(runner, before, bits)
        effects += [TraceEffect("", "done", last)] if last else []
    source = move.move.source
    ended = "stopped" if flat is None else _outcome(runner, move, flat, effects)
    target = move.move.target if flat is None else runner.flats[flat]
    event = move.move.event + (f" ({move.move.note})" if move.move.note else "")
    return Step(event, move.move.tag, names[source], names[target], ended, tuple(effects))


def _outcome(runner: Runner, move: RunMove, flat: int, effects: list[TraceEffect]) -> str:
    if all(effect.outcome == "done" for effect in effects):
        return "done"
    return (
        "undone" if runner.flats[flat] == move.move.source != runner.program.faults.get(move.move.source) else "fault"
    )


def _changes(runner: Runner, before: int, after: int) -> tuple[Change, ...]:
    """Facts that differ; those of one event alone, and of inverses, are left out."""
    local = set(runner.program.words.local())
    differ = [name for n, name in enumerate(runner.program.bits) if (before ^ after) >> n & 1 and name not in local]
    return tuple(
        Change(read_as(name), bool(before >> runner.index[name] & 1), not before >> runner.index[name] & 1)
        for name in differ
    )
