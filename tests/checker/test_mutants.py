"""Mutants of the actor's table: what nobody notices has a reason, and there are few."""

from __future__ import annotations

import pytest

from lifecycle.checker.mutate import EQUIVALENT, judge, judge_all, mutants, summary
from states.actor import ACTOR

MUTANTS = tuple(mutants(ACTOR))


def test_mutants_are_mutants():
    """Each differs from the table in one row, and no two are one."""
    assert len(MUTANTS) > 500
    assert all(mutant.spec_rows != ACTOR.rows for mutant in MUTANTS)
    assert len({mutant.spec_rows for mutant in MUTANTS}) == len(MUTANTS)


def test_every_lost_row_is_refused():
    """A table that lost a row can not be built."""
    lost = [judge(ACTOR, mutant) for mutant in MUTANTS if mutant.kind == "row removed"]
    assert len(lost) == len(ACTOR.rows)
    assert {verdict.outcome for verdict in lost} == {"refused"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_survivors_have_a_reason():
    """At most one in twenty survives, each for a reason that is written down, and no reason is left over."""
    verdicts = list(judge_all(ACTOR))
    survivors = [verdict for verdict in verdicts if verdict.outcome == "survives"]
    assert [verdict for verdict in survivors if verdict.reason is None] == []
    assert len(survivors) <= len(verdicts) / 20
    assert {verdict.reason for verdict in survivors} == set(EQUIVALENT.values())
    assert len(summary(verdicts)["survivors"]) == len(survivors)
