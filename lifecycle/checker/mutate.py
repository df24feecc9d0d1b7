"""Mutants of a declaration: does anything notice if one effect, guard or row is lost, or stands elsewhere?

Each mutant changes one thing. It is *refused* when the definition checks do not let it be built, *found* when the
exploration breaks an invariant, and *survives* otherwise: then it is equivalent as far as the facts can tell, and needs
a reason (``EQUIVALENT``). Run ``python -m lifecycle.checker.mutate`` for the figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise

from attrs import evolve, frozen

from lifecycle.checker.ground import Model
from lifecycle.checker.report import check
from lifecycle.checker.words import Instance
from states.actor import ACTOR
from states.checks import describe
from states.spec import DefinitionError, MachineSpec, Row

#: Small, and large enough for every fault that one tag beside 'actor' and one engine can show.
INSTANCES = (
    Instance(tags=("ref",), engines=("a",), slots=("trained",), labels=()),
    Instance(tags=("ref",), engines=(), slots=("trained",), labels=(), keeps_addresses=False),
)


@frozen
class Mutant:
    """``change`` says what was done to which row."""

    kind: str
    row: str
    change: str
    spec_rows: tuple[Row, ...]


@frozen
class Verdict:
    """``by``: the finding or the invariant; "" where nobody noticed."""

    kind: str
    row: str
    change: str
    outcome: str
    by: str
    length: int = 0


def mutants(spec: MachineSpec) -> Iterator[Mutant]:
    """Every row removed; in each every effect and guard removed, neighbouring effects swapped, the target changed."""
    for place, row in enumerate(spec.rows):
        before, after = spec.rows[:place], spec.rows[place + 1 :]
        yield Mutant("row removed", describe(row), "", (*before, *after))
        for kind, change, changed in _changed(spec, row):
            yield Mutant(kind, describe(row), change, (*before, changed, *after))


def _changed(spec: MachineSpec, row: Row) -> Iterator[tuple[str, str, Row]]:
    effects, guards = row.effects, row.guards
    for n, name in enumerate(effects):
        yield "effect removed", name, evolve(row, effects=(*effects[:n], *effects[n + 1 :]))
    for n, (one, other) in enumerate(pairwise(effects)):
        swapped = (*effects[:n], other, one, *effects[n + 2 :])
        yield "effects swapped", f"{one}, {other}", evolve(row, effects=swapped)
    for n, name in enumerate(guards):
        yield "guard removed", name, evolve(row, guards=(*guards[:n], *guards[n + 1 :]))
    for state in spec.states:
        if state.name not in (row.target, row.source) and not state.per_tag:
            yield "target changed", state.name, evolve(row, target=state.name)


def judge(spec: MachineSpec, mutant: Mutant) -> Verdict:
    """What notices this mutant first: the definition checks, or the exploration of the instances in turn."""
    told = (mutant.kind, mutant.row, mutant.change)
    try:
        changed = evolve(spec, rows=mutant.spec_rows)
    except DefinitionError as error:
        return Verdict(*told, "refused", error.problems[0])
    for instance in INSTANCES:
        report = check(Model(changed, instance))
        if report.findings:
            return Verdict(*told, "found", report.findings[0].invariant, len(report.findings[0]))
    return Verdict(*told, "survives", "")


def main() -> None:
    """Judge every mutant of the actor's table and print the figures as JSON."""
    verdicts = []
    for number, mutant in enumerate(mutants(ACTOR), 1):
        verdicts.append(judge(ACTOR, mutant))
        print(f"\r{number} mutants", end="", file=sys.stderr)
    print(file=sys.stderr)
    counts: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        by_outcome = counts.setdefault(verdict.kind, {})
        by_outcome[verdict.outcome] = by_outcome.get(verdict.outcome, 0) + 1
    plain = [[v.kind, v.row, v.change, v.outcome, v.by, v.length] for v in verdicts]
    print(json.dumps({"mutants": len(verdicts), "counts": counts, "verdicts": plain}, indent=1))


if __name__ == "__main__":
    main()
