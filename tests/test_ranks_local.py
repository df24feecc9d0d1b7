"""Ranks that act as one: all move, or none does, or all are FAULTED and recover together."""

from __future__ import annotations

import threading

import pytest
from rig import Net, Rig, adam, snapshot, striking

from lifecycle import ActorLifecycle, EffectFailed, RanksDisagree, TransitionRefused, UnknownTag
from lifecycle.memory.arena import ArenaBackend
from lifecycle.ranks.local import LocalRanks
from states.actor import ACTOR
from states.joint import MET, RANK_RULES, RANKED


@pytest.fixture(name="ranked")
def _ranked(few_objects):
    """(ranks, rigs): three actors, joined."""
    ranks = LocalRanks(3, timeout=10)
    rigs = []
    for rank in range(3):
        model = Net(rank)
        optimizer, memory = adam(model), ArenaBackend(poison=0xCB)
        tags = ("ref", "old_actor")
        actor = ActorLifecycle(model, optimizer, tags, memory, machine=RANKED, perform=ranks.perform(rank))
        rigs.append(Rig(actor, model, optimizer, dict.fromkeys(("actor", *tags), snapshot(model))))
    with pytest.raises(ValueError, match="2 actors for 3 ranks"):
        ranks.join([rig.actor for rig in rigs[:2]])
    ranks.join([rig.actor for rig in rigs])
    return ranks, rigs


def states(ranks):
    return set(ranks.states.values())


def check(rigs):
    for rig in rigs:
        rig.check()


def test_all_move(ranked):
    """A life of all ranks together: each holds its own weights, and all are in one state all the time."""
    ranks, rigs = ranked
    for event, arguments, state in [
        ("begin_training", (), "RESIDENT"),
        ("end_training", (), "RESIDENT"),
        ("sleep", (), "ASLEEP"),
        ("sleep", (), "ASLEEP"),
        ("wake_up", ("ref",), "SWITCHED(ref)"),
        ("switch", ("actor",), "RESIDENT"),
        ("tag", ("ref", "actor"), "RESIDENT"),
        ("sleep", (), "ASLEEP"),
        ("wake_up", (), "RESIDENT"),
    ]:
        ranks.ask(event, *arguments)
        assert states(ranks) == {state}
        check(rigs)
    ranks.ask("close")
    assert states(ranks) == {"CLOSED"}


def test_refused_by_all(ranked):
    """What every rank refuses alike is that refusal; what only some would do is done by none."""
    ranks, rigs = ranked
    with pytest.raises(UnknownTag):
        ranks.ask("switch", "nobody")
    ranks.ask("begin_training")
    with pytest.raises(TransitionRefused, match="a training phase is open"):
        ranks.ask("sleep")
    rigs[1].actor.abort_training()
    with pytest.raises(RanksDisagree, match=r"rank 0: sleep refused.*rank 1: could go on"):
        ranks.ask("sleep")
    assert states(ranks) == {"RESIDENT"}


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("effect", ["copy_out_weights", "back_up_regions", "verify_weights"])
def test_failure_before_they_agree(ranked, victim, effect):
    """A rank that fails before they have met takes nobody with it: all undo, and then it works."""
    ranks, rigs = ranked

    def fail():
        raise OSError("no space")

    with striking(rigs[victim].actor, fail, effect) as strike, pytest.raises(RanksDisagree) as error:
        ranks.ask("sleep")

    assert strike.at == ("sleep", effect)
    assert "no space" in error.value.per_rank[victim]
    assert [said for rank, said in error.value.per_rank.items() if rank != victim] == ["ready; undone"] * 2
    assert states(ranks) == {"RESIDENT"}
    check(rigs)
    ranks.ask("sleep")
    assert states(ranks) == {"ASLEEP"}
    check(rigs)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("event", "effect"),
    [("sleep", "pause_regions"), ("wake_up", "restore_weights")],
)
def test_failure_behind_the_agreement(ranked, victim, event, effect):
    """A rank that fails when nobody can be held back any more takes all to FAULTED, some with weights and some
    without; where one has lost them all recover to ASLEEP, with nothing lost."""
    ranks, rigs = ranked
    if event == "wake_up":
        ranks.ask("sleep")

    def fail():
        raise RuntimeError("broken")

    with striking(rigs[victim].actor, fail, effect), pytest.raises(EffectFailed) as error:
        ranks.ask(event)

    assert f"failed on rank {victim}; all ranks are FAULTED now" in error.value.__notes__[-1]
    assert {state.split("(")[0] for state in states(ranks)} == {"FAULTED"}
    ranks.ask("recover")
    assert states(ranks) == {"ASLEEP"}
    ranks.ask("wake_up")
    check(rigs)


def test_ranks_that_are_apart(ranked):
    """Ranks in different states are told so; nothing is asked of any."""
    ranks, rigs = ranked
    rigs[0].actor.close()
    with pytest.raises(RanksDisagree, match="rank 0: CLOSED; rank 1: RESIDENT"):
        ranks.ask("sleep")


def test_rank_asked_alone(ranked):
    """One rank asked for what ranks do together refuses, and undoes what it did."""
    ranks, rigs = ranked
    with pytest.raises(RanksDisagree, match="asked of this rank alone"):
        rigs[0].actor.sleep()
    assert states(ranks) == {"RESIDENT"}
    check(rigs)


def test_rank_that_does_not_come(ranked):
    """Ranks do not wait for ever for one that says nothing; it finds that it is too late when it comes."""
    ranks, rigs = ranked
    ranks._timeout = 0.2
    go = threading.Event()
    with striking(rigs[2].actor, lambda: go.wait(20), "copy_out_weights"):
        threading.Timer(0.6, go.set).start()
        with pytest.raises(RanksDisagree):
            ranks.ask("sleep")
    assert states(ranks) == {"RESIDENT"}
    check(rigs)


def test_every_row_that_agrees_meets():
    """The machine of a rank is the actor's, but for the meeting, which stands before every agreement."""
    for row, own in zip(ACTOR.rows, RANKED.rows, strict=True):
        if row.event in MET and RANK_RULES.agree in row.effects:
            assert own.effects[own.effects.index(RANK_RULES.agree) - 1] == "meet_ranks"
        assert tuple(name for name in own.effects if name != "meet_ranks") == row.effects
