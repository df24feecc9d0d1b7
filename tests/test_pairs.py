"""Every (state, event) pair against the table, on a real controller with real memory."""

from __future__ import annotations

import pytest
from scenarios import engine, make_actor, make_busy, session, weights_of

from lifecycle import Faulted, LifecycleError, TransitionRefused
from lifecycle.plan import Table, allowed_events
from lifecycle.testing.injection import failing
from lifecycle.testing.late import LateArena
from lifecycle.testing.observe import broken_contract, observed
from states.actor import ACTOR
from states.resources import Fact
from states.spec import Match

pytestmark = pytest.mark.usefixtures("few_objects")

TABLE = Table.of(ACTOR, ("actor", "ref", "old_actor"))
NEEDS_TAG = {"wake_up", "switch", "load", "tag"}
#: Flat states, and RESIDENT and SWITCHED with open business or bytes on their way, by how they are reached.
SITUATIONS = {
    "RESIDENT": lambda actor, _: None,
    "RESIDENT training": lambda actor, _: actor.begin_training(),
    "RESIDENT loading": lambda actor, _: actor._fire("load", tag="ref"),
    "RESIDENT arriving": lambda actor, _: (actor.sleep(), actor.wake_up()),
    "SWITCHED_ref": lambda actor, _: actor.switch("ref"),
    "SWITCHED_ref loading": lambda actor, _: (actor.switch("ref"), actor._fire("load", tag="old_actor")),
    "SWITCHED_ref arriving": lambda actor, _: (actor.sleep(), actor.wake_up("ref")),
    "SWITCHED_old_actor": lambda actor, _: actor.switch("old_actor"),
    "ASLEEP": lambda actor, _: actor.sleep(),
    "SYNCING_RESIDENT": lambda actor, sync: actor._fire("start_sync", **sync),
    "SYNCING_SWITCHED_ref": lambda actor, sync: (actor.switch("ref"), actor._fire("start_sync", **sync)),
    "SYNCING_SWITCHED_old_actor": lambda actor, sync: (actor.switch("old_actor"), actor._fire("start_sync", **sync)),
    "SYNCING_ASLEEP": lambda actor, sync: (actor.sleep(), actor._fire("start_sync", **sync)),
    "FAULTED": lambda actor, _: _break(actor),
    "CLOSED": lambda actor, _: actor.close(),
}
CALLS = [
    (event.name, tag)
    for event in ACTOR.events
    if event.name != "fault"  # fired by the controller alone, when an effect could not be undone
    for tag in (("actor", "ref", "old_actor") if event.name in NEEDS_TAG else (None,))
]


def _break(actor):
    with failing(actor, "pause_regions"), pytest.raises(LifecycleError):
        actor.sleep()


def _bring(situation):
    """A busy actor; one whose restores may be late, where they are to be."""
    actor, model, optimizer = make_actor(memory=LateArena(poison=0xCB) if "arriving" in situation else None)
    make_busy(actor, model, optimizer)
    return actor


def _facts_refuse(event, situation, tag):
    """Why the guards must refuse although there is a row; None if they must not. Written from the design, by hand."""
    training, loading = "training" in situation, "loading" in situation
    flat = situation.split()[0]
    quiet = {"sleep", "begin_training", "load", "adopt", "start_sync", "close"}
    if training and event in quiet | {"switch"} - {"close"}:
        # a switch to the tag that is shown asks for nothing
        return None if (event, tag) == ("switch", "actor") else "a training phase is open"
    if training and event in ("load_optimizer", "discard_grads"):
        return "a training phase is open"
    if loading and event in quiet | {"switch"} - {"close"}:
        shown = "actor" if flat == "RESIDENT" else flat.removeprefix("SWITCHED_")
        return None if event == "switch" and tag == shown == "actor" else "a load is open"
    if event in ("end_training", "abort_training") and not training:
        return "no training phase is open"
    if event in ("finish_load", "abort_load") and not loading:
        return "no load is open"
    if event == "tag" and tag == "actor":
        return "'actor' follows training"
    if event == "tag" and flat.endswith(f"SWITCHED_{tag}"):
        return "the device shows this tag"
    return None


@pytest.mark.parametrize(("event", "tag"), CALLS, ids=lambda value: str(value))
@pytest.mark.parametrize("situation", SITUATIONS)
def test_pair(situation, event, tag):
    """The event ends in the row's target with the target's contract kept, or is refused and changes nothing."""
    actor = _bring(situation)
    with session(actor, engine()) as sync:
        SITUATIONS[situation](actor, sync)
        source = actor._machine.state
        before, journal = actor.facts, len(actor.journal)
        rows = TABLE.candidates(event, source, tag)
        refused_by = _facts_refuse(event, situation, tag) if rows else "there is no such transition"
        arguments = sync if event.endswith("_sync") else {"tag": tag} if tag else {}
        arguments = {**arguments, "of": "ref"} if event == "tag" else arguments

        if refused_by:
            with pytest.raises(TransitionRefused) as error:
                actor._fire(event, **arguments)
            _check_refusal(error.value, event, source, refused_by)
            assert (actor._machine.state, actor.facts, len(actor.journal)) == (source, before, journal)
            return
        actor._fire(event, **arguments)

    assert actor._machine.state in {row.target for row in rows}
    assert broken_contract(actor, _declared(actor)) == []
    if actor.state.name not in ("CLOSED", "FAULTED"):
        weights_of(actor)


def _check_refusal(error, event, source, refused_by):
    assert error.event.startswith(event)
    assert isinstance(error, Faulted) == (source == "FAULTED")
    if source == "FAULTED":
        assert error.allowed == ("recover", "close")
        return
    assert error.state == TABLE.names[source]
    assert set(error.allowed) <= set(allowed_events(TABLE, source))
    assert event not in error.allowed or event in NEEDS_TAG
    assert error.reason == refused_by
    assert error.state in str(error)


def _declared(actor):
    return ACTOR.state(actor.state.name)


def test_all_pairs_are_asked_for():
    """The enumeration above has every flat state, and every event a caller or the controller can ask for."""
    assert {situation.split()[0] for situation in SITUATIONS} == set(TABLE.states)
    assert {event for event, _ in CALLS} == {event.name for event in ACTOR.events} - {"fault"}


@pytest.mark.parametrize("situation", [s for s in SITUATIONS if " " not in s or "arriving" in s])
def test_contract_of_each_state(situation):
    """Each state's contract is what the world shows: mappings, fingerprints, groups, hooks."""
    actor = _bring(situation)
    with session(actor) as sync:
        SITUATIONS[situation](actor, sync)

        assert actor.state.arriving == ("arriving" in situation)
        assert broken_contract(actor, _declared(actor)) == []


def test_observation_can_fail():
    """A contract that is not kept is seen: the observer reads the world, not the controller."""
    actor, model, optimizer = make_actor()
    make_busy(actor, model, optimizer)
    model.body.weight.data.add_(1.0)

    assert "RESIDENT must hold VERSION_SHOWN" in broken_contract(actor, ACTOR.state("RESIDENT"))
    assert Fact.WEIGHTS in ACTOR.state("RESIDENT").holds
    assert Match.SHOWN in {row.match for row in ACTOR.rows}


def test_arrivals_are_observed():
    """What is on its way is seen as such until the event that waits for it; then its bytes are looked at."""
    actor = _bring("RESIDENT arriving")
    actor.sleep()
    actor.wake_up()
    coming = {fact for fact in (Fact.ARRIVING, Fact.OPTIMIZER_ARRIVING) if observed(actor)[fact]}
    assert coming == {Fact.ARRIVING, Fact.OPTIMIZER_ARRIVING}
    assert "CLOSED must lack ARRIVING" in broken_contract(actor, ACTOR.state("CLOSED"))

    actor._fire("arrive")
    assert not observed(actor)[Fact.ARRIVING]
    assert observed(actor)[Fact.OPTIMIZER_ARRIVING]
    actor._fire("arrive_optimizer")
    assert not observed(actor)[Fact.OPTIMIZER_ARRIVING]
    assert broken_contract(actor, ACTOR.state("RESIDENT")) == []
