"""How large the declared machines are when explored, and how long that takes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

from attrs import asdict, evolve, frozen

from lifecycle.checker.declared import models, sized
from lifecycle.checker.ranks import Ranks
from lifecycle.checker.report import check


@frozen
class Size:
    """One search. ``other_tags``: beside 'actor'."""

    machine: str
    other_tags: tuple[str, ...]
    engines: int
    slots: int
    ranks: int = 1
    reduced: bool = False


SIZES = (
    Size("actor", ("ref",), 1, 1),
    Size("actor", ("ref", "old_actor"), 1, 2),
    Size("actor", ("ref", "old_actor"), 1, 2, reduced=True),
    Size("actor", ("ref", "old_actor", "teacher", "rollout_actor"), 2, 1, reduced=True),
    Size("actor", ("ref",), 1, 1, ranks=2),
    Size("frozen", (), 1, 2),
    Size("rollout", (), 0, 1),
    Size("colocated", ("ref",), 1, 1),
    Size("colocated", ("ref",), 2, 1),
)


@frozen
class Measured:
    """What one search came to. ``steps`` is 0 where ranks were explored, which count moves alone."""

    size: Size
    states: int
    moves: int
    steps: int
    seconds: float
    findings: int
    complete: bool


def measure(told: Callable[[Measured], None] | None = None) -> dict[str, Any]:
    """Every search, one after the other; as plain data, with the machine they ran on."""
    found = []
    for one in _measured():
        found.append(one)
        if told is not None:
            told(one)
    return {"python": platform.python_version(), "cores": os.cpu_count(), "searches": [asdict(one) for one in found]}


def _measured() -> Iterator[Measured]:
    for size in SIZES:
        model = sized(models()[size.machine], size.other_tags, size.engines, size.slots)
        if size.ranks > 1:
            bare = evolve(model, instance=evolve(model.instance, labels=()))
            ranked = Ranks(bare, size.ranks).explore()
            yield Measured(size, ranked.states, ranked.moves, 0, ranked.seconds, len(ranked.findings), ranked.complete)
        else:
            report = check(model, size.reduced)
            counts = (report.states, report.moves, report.steps, report.seconds)
            yield Measured(size, *counts, len(report.findings), report.complete)
