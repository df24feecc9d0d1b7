"""Several machines at once: ranks of one actor, and an actor with engines on its device."""

from __future__ import annotations

import pytest
from attrs import evolve

from lifecycle.checker.declared import models
from lifecycle.checker.ground import Model
from lifecycle.checker.ranks import Ranks
from lifecycle.checker.report import check
from lifecycle.checker.words import Instance
from states.actor import ACTOR
from states.joint import COLOCATED, RANK_RULES

TINY = Instance(tags=(), engines=(), slots=("trained",), labels=())
TWO = Instance(tags=("ref",), engines=(), slots=("trained",), labels=())


# ranks


def test_ranks_rest_in_one_state():
    """Two ranks, two tags, whatever fails on one of them."""
    report = Ranks(Model(instance=TWO)).explore()
    assert report.complete
    assert report.findings == ()


@pytest.mark.slow
def test_ranks_rest_in_one_state_when_both_fail():
    """The assumption that one rank at most fails by itself in one event hides nothing on a small instance."""
    report = Ranks(Model(instance=TINY), failures=2).explore()
    assert report.complete
    assert report.findings == ()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_ranks_two_tags_one_engine():
    instance = Instance(tags=("ref",), engines=("a",), slots=("trained",), labels=())
    report = Ranks(Model(instance=instance)).explore()
    assert report.complete
    assert report.findings == ()
    assert report.seconds < 600


def test_symmetry_of_ranks_drops_nothing():
    """Every state of the ranks in their order is one of the sorted ones, and the other way round."""
    model = Model(instance=TINY)
    reduced, whole = Ranks(model), Ranks(model, symmetric=False)
    assert {tuple(sorted(state)) for state in _states(whole)} == set(_states(reduced))


def _states(ranks):
    first = (ranks.runner.first(),) * ranks.size
    seen, todo = {first}, [first]
    while todo:
        fresh = {end for _, end in ranks._ends(todo.pop())} - seen
        seen |= fresh
        todo += fresh
    return seen


def test_ranks_that_recover_each_by_itself_part():
    """One has lost its memory and goes to sleep, the other has not and stays awake (F147's kind)."""
    report = Ranks(Model(instance=TINY), rules=evolve(RANK_RULES, together=())).explore()
    (trace,) = report.findings
    assert trace.invariant == "ranks_agree"
    assert len(trace) <= 3
    assert {trace.steps[-1].event} == {"recover"}


def test_ranks_whose_fault_does_not_spread_part():
    """One is asleep, the other stopped on the way (https://github.com/radixark/miles/issues/384)."""

    class Apart(Ranks):
        def _all_faulted(self, before, end):
            return end

        def _spread(self, end):
            return end

    (trace,) = Apart(Model(instance=TINY)).explore().findings
    assert trace.invariant == "ranks_agree"
    assert len(trace) == 1


def test_ranks_lose_nothing_when_one_must_sleep_with_another():
    """Going down with a rank that has lost its memory needs copies of what is left on the devices of the others."""
    (trace,) = Ranks(Model(ACTOR, TINY, {"copy_out_everything": lambda asked: ()})).explore().findings
    assert trace.invariant in ("effect_needs_met", "version_has_copy")


def test_a_row_that_meets_and_one_that_does_not_are_never_mixed():
    """One rank holds the other tag's version already and the other does not: both rows must meet."""
    rows = tuple(
        evolve(row, effects=()) if row.event == "switch" and row.effects == ("agree",) else row for row in ACTOR.rows
    )
    (trace,) = Ranks(Model(evolve(ACTOR, rows=rows), TWO)).explore().findings
    assert trace.invariant == "ranks_agree"
    assert trace.steps[-1].outcome == "stopped"


@pytest.mark.parametrize("name", ["rollout", "colocated"])
def test_machines_without_rules_for_ranks_are_refused(name):
    with pytest.raises(ValueError, match="ranks"):
        Ranks(models()[name])


# an actor and engines on one device


@pytest.mark.parametrize("tags", [(), ("ref",)])
def test_out_before_in(tags):
    model = evolve(models()["colocated"], instance=Instance(tags=tags, slots=("trained",), labels=()))
    report = check(model)
    assert report.complete
    assert report.findings == ()
    assert report.premises["out_before_in"]
    assert report.premises["no_mixed_request"]


def test_two_engines_on_the_device():
    model = evolve(models()["colocated"], instance=Instance(tags=(), engines=("a", "b"), slots=("trained",), labels=()))
    whole, reduced = check(model), check(model, reduce=True)
    assert whole.findings == reduced.findings == ()
    assert whole.complete
    assert reduced.complete
    assert reduced.states < whole.states < 2 * reduced.states


@pytest.mark.parametrize("rule", [rule.name for rule in COLOCATED.rules])
def test_without_a_rule_both_are_in(rule):
    """Each rule is needed: without it the device is used twice (F091: https://github.com/radixark/miles/pull/86)."""
    joint = evolve(COLOCATED, rules=tuple(one for one in COLOCATED.rules if one.name != rule))
    (trace,) = check(Model(ACTOR, Instance(tags=(), slots=("trained",), labels=()), joint=joint)).findings
    assert trace.invariant == "out_before_in"
    assert len(trace) <= 3


def test_without_a_link_the_engine_is_taken_for_what_it_is_not():
    """The actor notes a version that the engine was never told to hold."""
    joint = evolve(COLOCATED, links=tuple(link for link in COLOCATED.links if link.effect != "end_updates"))
    (trace,) = check(Model(ACTOR, Instance(tags=(), slots=("trained",), labels=()), joint=joint)).findings
    assert trace.invariant == "engine_is_known"
