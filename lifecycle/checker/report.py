"""Checking one declared machine: what was explored, what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import asdict, frozen

from lifecycle.checker.colocated import program_of
from lifecycle.checker.explain import traces
from lifecycle.checker.explore import Found, explore
from lifecycle.checker.formula import compiled
from lifecycle.checker.ground import Model
from lifecycle.checker.invariants import STEPS, state_invariants
from lifecycle.checker.reduce import engine_renamings, symmetry, without_labels
from lifecycle.checker.trace import Trace

#: What of an actor is in the abstraction, in the words of the design.
FACTS = (
    "residency per region (weights, gradients, optimizer, workspaces, rest)",
    "copies per part and tag (device, elsewhere), and which tags share a part",
    "validity and copies of optimizer state and rest",
    "working version and its base (training phase)",
    "half-moved parts (every effect may stop between two of its steps)",
    "open load and its tag",
    "process groups, and groups raised for a sync",
    "captured graphs",
    "lease of a sync and where it reads; readers of device and copies",
    "open scope, gradients left by a backward, free memory (may be so whenever an event is asked for)",
    "per engine: holds a version, all its bytes, generates; applied and published version",
    "moving event and effect",
)


@frozen
class Report:
    """``moves``: events and moves of the environment, from every state. ``steps``: micro-steps that were executed."""

    machine: str
    tags: tuple[str, ...]
    engines: tuple[str, ...]
    slots: tuple[str, ...]
    reduced: bool
    complete: bool
    states: int
    moves: int
    steps: int
    seconds: float
    premises: dict[str, int]
    invariants: dict[str, str]
    findings: tuple[Trace, ...]

    def to_plain(self) -> dict[str, Any]:
        """For programs: what was explored, the facts and invariants, and every finding as a trace."""
        return {
            **asdict(self, filter=lambda attribute, _: attribute.name != "findings"),
            "facts": FACTS,
            "findings": [trace.to_plain() for trace in self.findings],
        }


def check(
    model: Model,
    reduce: bool = False,
    stop_at_first: bool = True,
    limit: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Report:
    """Explore every reachable state of the machine.

    ``reduce``: states that differ in names of tags or engines are one, and labels, by which nothing decides, are not
    tracked; see the notes in ``lifecycle/checker/reduce.py``.

    Raises ValueError where an effect has no meaning.
    """
    found = _reduced(model, stop_at_first, limit, progress) if reduce else None
    if found is None or found.broken:  # a counter-example is always one of the machine itself
        found = explore(program_of(model), None, stop_at_first, limit, progress=progress)
        reduce = False
    program = found.runner.program
    one = model.instance
    return Report(
        model.spec.name if model.joint is None else model.joint.name,
        one.all_tags,
        one.engines,
        one.slots,
        reduce,
        found.complete,
        len(found.parents),
        found.moves,
        found.steps,
        found.seconds,
        _premises(found),
        {**{one.name: one.why for one in state_invariants(program)}, **STEPS},
        traces(found),
    )


def _reduced(
    model: Model, stop_at_first: bool, limit: int | None, progress: Callable[[int, int, int], None] | None
) -> Found:
    program = program_of(without_labels(model))
    return explore(
        program, symmetry(program), stop_at_first, limit, variants=engine_renamings(program), progress=progress
    )


def _premises(found: Found) -> dict[str, int]:
    """In how many states each state invariant asks anything."""
    program, index = found.runner.program, found.runner.index
    tests = {one.name: compiled(one.premise(program.words), index) for one in state_invariants(program)}
    return {name: sum(1 for _, bits in found.parents if test(bits)) for name, test in tests.items()}
