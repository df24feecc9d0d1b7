"""The rules over several machines: what they cover, and what can not be declared."""

from __future__ import annotations

import re

import pytest
from attrs import evolve

from lifecycle import SyncFailed
from lifecycle.testing.engines import FakeEngine
from states.actor import ACTOR
from states.joint import COLOCATED, RANK_RULES, JointRule, JointSpec, Link, RankRules
from states.resources import Fact
from states.rollout import ROLLOUT, EngineFact
from states.spec import DefinitionError


def test_rules_cover_all_rows_that_map():
    """Every row by which either maps device memory is under a rule, and no other row is."""
    for machine, effects in (("actor", "resume_.*_regions|bring_back"), ("rollout", "resume_.*")):
        spec = COLOCATED.member(machine)
        for row in spec.rows:
            maps = any(re.fullmatch(effects, effect) for effect in row.effects)
            assert bool(COLOCATED.rules_for(machine, row)) == maps, row
    assert COLOCATED.leader is ACTOR


def test_links_are_what_a_sync_asks():
    """Each link's event is one that the engine may be in a state for, in the order of the actor's effects."""
    (row,) = [row for row in ACTOR.rows if row.event == "finish_sync"]
    asked = [link.event for effect in row.effects for link in COLOCATED.linked(effect) if not link.unless]
    assert asked == [
        "pause_generation",
        "flush_cache",
        "begin_update",
        "check_weights",
        "end_update",
        "continue_generation",
    ]


@pytest.mark.parametrize("trouble", [None, "pause_generation", "flush_cache", "begin_update", "check_weights"])
def test_links_are_what_is_really_asked(make, trouble):
    """In a sync, whole or failing, each effect asks of each engine what its links say, and nothing else."""
    rig, asked = make(), []
    engines = [FakeEngine(name, transports=("in_process",)) for name in ("first", "second")]
    rig.actor.sync(engines)  # from here on it is known what they hold
    for engine in engines:

        def entered(operation, *arguments, enter=engine._enter):
            asked.append((rig.actor.moving[1], operation))
            enter(operation, *arguments)

        engine._enter = entered
    if trouble is None:
        rig.actor.sync(engines)
    else:
        engines[1].fail_on.add(trouble)
        with pytest.raises(SyncFailed):
            rig.actor.sync(engines)

    links = {(link.effect, link.event) for link in COLOCATED.links}
    assert asked
    assert set(asked) <= links
    whole = {pair for pair in links if pair[0] not in ("continue_untouched", "abort_updates") and pair[1] != "receive"}
    assert trouble is not None or set(asked) == whole


RULE = COLOCATED.rules[0]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"members": (ACTOR,)}, "two machines at least"),
        ({"members": (ACTOR, ROLLOUT, ROLLOUT)}, "member twice"),
        ({"members": (ACTOR, ROLLOUT, evolve(ROLLOUT, name="other"))}, "a fact in common"),
        ({"links": (Link("fly", "flush_cache"),)}, "actor has no such effect"),
        ({"links": (Link("flush_caches", "fly"),)}, "rollout has no event 'fly'"),
        ({"rules": (RULE, RULE)}, "declared more than once"),
        ({"rules": (evolve(RULE, machine="ghost"),)}, "unknown machine 'ghost'"),
        ({"rules": (evolve(RULE, other="actor", forbids=[Fact.WEIGHTS]),)}, "for its guards"),
        ({"rules": (evolve(RULE, effects=("fly",)),)}, "actor has no effect 'fly'"),
        ({"rules": (evolve(RULE, effects=("bring_back", "fly")),)}, "no effect 'fly'"),
        ({"rules": (evolve(RULE, effects=("pause_resumed",)),)}, "no row of actor is under it"),
        ({"rules": (evolve(RULE, forbids=[EngineFact.OLDER]),)}, "OLDER is a condition"),
        ({"rules": (evolve(RULE, forbids=[Fact.WEIGHTS]),)}, "rollout knows no fact WEIGHTS"),
        ({"opening": (("rollout", "fly"),)}, "'rollout' has no event 'fly'"),
        ({"opening": (("ghost", "stop"),)}, "'ghost' has no event 'stop'"),
    ],
)
def test_wrong_joint_declarations(changes, finding):
    """What names nothing, or could never apply, is a finding."""
    with pytest.raises(DefinitionError, match=finding):
        evolve(COLOCATED, **changes)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"machine": ROLLOUT}, "rollout has no effect 'agree'"),
        ({"spread": "fly"}, "actor has no event 'fly'"),
        ({"together": [Fact.HOOKS]}, "no row of actor is chosen by HOOKS"),
    ],
)
def test_wrong_rules_over_ranks(changes, finding):
    """The same for what ranks do together."""
    with pytest.raises(DefinitionError, match=finding):
        evolve(RANK_RULES, **changes)
    assert RANK_RULES.agree == "agree"


def test_declarations_are_plain_values():
    """A joint declaration of one's own is a few lines."""
    rule = JointRule("r", "reason", "Advice.", "rollout", ("resume_weights",), "actor", [Fact.WEIGHTS])
    mine = JointSpec("mine", (ACTOR, ROLLOUT), rules=(rule,))
    assert [row.event for row in ROLLOUT.rows if mine.rules_for("rollout", row)] == ["resume_weights"] * 3
    assert RankRules("mine", ACTOR, "fault", []).together == frozenset()
