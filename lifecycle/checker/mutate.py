"""Mutants of a declaration: does anything notice if one effect, guard or row is lost, or stands elsewhere?

Each mutant changes one thing. It is *refused* when the definition checks do not let it be built, *found* when the
exploration breaks an invariant, and *survives* otherwise: then it is equivalent as far as the facts can tell, and needs
a reason (``EQUIVALENT``). Run ``python -m lifecycle.checker.mutate`` for the figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

from attrs import evolve, frozen

from lifecycle.checker.ground import Model
from lifecycle.checker.ranks import Ranks
from lifecycle.checker.report import check
from lifecycle.checker.words import Instance
from states.actor import ACTOR
from states.checks import describe
from states.spec import DefinitionError, MachineSpec, Row

#: Small, and large enough for every fault that one tag beside 'actor' and one engine can show, on a memory backend that
#: can do everything and on one that copies at once, one way at a time, to other addresses.
INSTANCES = (
    Instance(tags=("ref",), engines=("a",), slots=("trained",), labels=()),
    Instance(
        tags=("ref",),
        engines=(),
        slots=("trained",),
        labels=(),
        keeps_addresses=False,
        stream_ordered=False,
        overlaps=False,
    ),
    Instance(tags=("ref", "old_actor"), engines=(), slots=("trained",), labels=()),
)
#: Two ranks of it are explored last.
RANKED = Instance(tags=("ref",), engines=(), slots=("trained",), labels=())

_IN_A_PHASE = "a phase begins when everything has come, and nothing is asked for while it is open"
_WEIGHTS_ALONE = "the optimizer may go on arriving: it is about weights alone"

#: Mutants that nobody notices, by (kind, event, what was changed), and why that is right.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "guard removed",
        "switch",
        "no_device_reader",
    ): "where the device holds the tag's version nothing is overwritten",
    (
        "guard removed",
        "switch",
        "arrived",
    ): "where the device holds the tag's version it goes on arriving, and is waited for under the other tag",
    ("guard removed", "end_training", "arrived"): _IN_A_PHASE,
    ("guard removed", "end_training", "optimizer_arrived"): _IN_A_PHASE,
    ("guard removed", "abort_training", "arrived"): _IN_A_PHASE,
    ("guard removed", "abort_training", "optimizer_arrived"): _IN_A_PHASE,
    ("guard removed", "load_optimizer", "arrived"): "weights may go on arriving: it looks at the optimizer alone",
    ("guard removed", "load", "optimizer_arrived"): _WEIGHTS_ALONE,
    ("guard removed", "adopt", "optimizer_arrived"): _WEIGHTS_ALONE,
    ("effects swapped", "sleep", "settle_writers, check_structure"): "both only look, and neither looks at the other's",
    ("effects swapped", "start_sync", "settle_writers, check_structure"): "both only look",
    ("effects swapped", "sleep", "copy_out_weights, back_up_regions"): "both only copy, and of different regions",
    ("effects swapped", "sleep", "drop_workspaces, discard_grads"): "both drop what is worth nothing, independently",
    ("effects swapped", "recover", "drop_workspaces, discard_grads"): "both drop what is worth nothing, independently",
    (
        "effect removed",
        "wake_up",
        "check_structure",
    ): "a model that was changed asleep is found by the next event instead",
    (
        "effect removed",
        "close",
        "check_structure",
    ): "a model that was changed is found by the copy, and then is a fault",
    (
        "effect removed",
        "wake_up",
        "reload_groups",
    ): "awake, groups are up by contract; the design asks for it all the same",
    (
        "effects swapped",
        "switch",
        "resume_actor_regions, exchange_weights",
    ): "the weights are mapped; the optimizer is resumed",
    (
        "guard removed",
        "load_optimizer",
        "no_phase",
    ): "state put in amid a phase is kept; refusing says that it is unusual",
    ("effects swapped", "recover", "check_copies, resume_actor_regions"): "what is mapped in vain is mapped in FAULTED",
    ("effects swapped", "recover", "check_copies, drop_workspaces"): "workspaces are worth nothing, checked or not",
    (
        "effects swapped",
        "close",
        "agree, copy_out_survivors",
    ): "copying can be undone, so either side of the meeting will do",
    (
        "effects swapped",
        "close",
        "copy_out_survivors, resume_actor_regions",
    ): "the optimizer's memory is not copied from",
    (
        "effects swapped",
        "close",
        "resume_actor_regions, restore_actor",
    ): "the weights are mapped; the optimizer is resumed",
    ("effects swapped", "close", "abandon_sync, lower_sync_groups"): "both end what a sync has begun, independently",
    (
        "effects swapped",
        "fail_sync",
        "continue_untouched, lower_sync_groups",
    ): "engines do not use the trainer's groups",
}


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

    @property
    def reason(self) -> str | None:
        """Why nobody needs to notice; None where somebody should."""
        event = self.row.removeprefix("row ").partition(" ")[0].partition("(")[0]
        return EQUIVALENT.get((self.kind, event, self.change))


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
    between = "SWITCHED -> SWITCHED" in mutant.row  # there must be two tags to switch between
    ranked = Ranks(Model(changed, INSTANCES[-1] if between else RANKED)).explore()
    if ranked.findings:
        return Verdict(*told, "found", ranked.findings[0].invariant, len(ranked.findings[0]))
    return Verdict(*told, "survives", "")


def judge_all(spec: MachineSpec) -> Iterator[Verdict]:
    """Every mutant, on all cores, in the order of ``mutants``."""
    with ProcessPoolExecutor() as pool:
        yield from pool.map(partial(judge, spec), mutants(spec))


def main() -> int:
    """Judge every mutant of the actor's table and print the figures as JSON; 1 if one survives without a reason."""
    verdicts = []
    for number, verdict in enumerate(judge_all(ACTOR), 1):
        verdicts.append(verdict)
        print(f"\r{number} mutants", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(json.dumps(summary(verdicts), indent=1))
    return 1 if any(one.outcome == "survives" and one.reason is None for one in verdicts) else 0


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts per kind and outcome, the survivors with their reasons, and every verdict."""
    counts: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        by_outcome = counts.setdefault(verdict.kind, {})
        by_outcome[verdict.outcome] = by_outcome.get(verdict.outcome, 0) + 1
    survivors = [[v.kind, v.row, v.change, v.reason] for v in verdicts if v.outcome == "survives"]
    every = [[v.kind, v.row, v.change, v.outcome, v.by, v.length] for v in verdicts]
    return {"mutants": len(verdicts), "counts": counts, "survivors": survivors, "verdicts": every}


if __name__ == "__main__":
    sys.exit(main())
