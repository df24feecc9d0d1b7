"""The corpus: each machine breaks what it is said to break, and every invariant is broken by some machine."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest
from attrs import evolve

from lifecycle.checker.ground import ground
from lifecycle.checker.invariants import STATES, STEPS, state_invariants
from lifecycle.checker.report import check
from lifecycle.checker.steps import Invariant
from lifecycle.checker.trace import trace_from_plain
from states.actor import ACTOR
from states.spec import DefinitionError
from tests.checker.machines.variants import SMALL, model

NAMES = sorted(
    path.stem for path in (Path(__file__).parent / "machines").glob("*.py") if path.stem not in ("__init__", "variants")
)


def _machine(name):
    return importlib.import_module(f"tests.checker.machines.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_invariant_breaks(name):
    """By a trace that is not longer than it need be, in far less than ten seconds of the processor."""
    machine = _machine(name)
    began = time.process_time()
    report = check(machine.MACHINE)
    assert time.process_time() - began < 10
    (trace,) = report.findings
    assert trace.invariant == machine.INVARIANT
    assert len(trace) <= machine.LENGTH
    assert trace.steps[-1].outcome == "stopped" or trace.invariant == "way_home"
    assert trace_from_plain(trace.to_plain()) == trace


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_a_path(name):
    """Each step starts where the one before it ended: at its target, back at its source, or in the fault."""
    (trace,) = check(_machine(name).MACHINE).findings
    here = "RESIDENT"
    for step in trace.steps:
        assert step.source == here
        here = step.source if step.outcome == "undone" else step.target


def test_every_invariant_is_broken_by_some_machine():
    program = ground(model())
    names = {one.name for one in state_invariants(program)} | set(STEPS)
    names.remove("fault_is_declared")  # a declaration without the row is refused when it is built: see the next test
    assert {_machine(name).INVARIANT for name in NAMES} == names


def test_a_machine_without_a_fault_row_is_refused():
    rows = tuple(row for row in ACTOR.rows if (row.event, row.source) != ("fault", "SYNCING"))
    with pytest.raises(DefinitionError, match="SYNCING has no row for 'fault'"):
        evolve(ACTOR, rows=rows)


@pytest.mark.parametrize("able", [True, False])
def test_the_declared_machine_breaks_none(able):
    """The same instance, and so the same moves, apart from what the variants change; also where a memory backend copies
    at once, one way at a time."""
    report = check(model(instance=evolve(SMALL, stream_ordered=able, overlaps=able)))
    assert report.complete
    assert report.findings == ()
    assert all(count for name, count in report.premises.items() if name != "reader_undisturbed")  # never at rest


@pytest.mark.parametrize("one", STATES, ids=lambda one: one.name)
def test_no_invariant_is_true_of_anything(one):
    """Its premise comes about in our own machine: turned round, it is broken there."""

    def holds(words):
        return ~one.holds(words)

    turned = Invariant(f"not_{one.name}", "", one.premise, holds, one.at_rest, one.but_in)
    (trace,) = check(evolve(model(), invariants=(turned,))).findings
    assert trace.invariant == turned.name
