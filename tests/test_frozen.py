"""A frozen actor: every (state, event) pair on real memory, and what it refuses.

Its effects are made to fail where the training actor's are, in ``test_effect_failures``.
"""

from __future__ import annotations

import pytest
import torch
from scenarios import TOKENS, assert_equal_weights, engine, live_weights, load_noise, make_frozen, session, weights_of

from lifecycle import ActorLifecycle, Faulted, LifecycleError, TransitionRefused
from lifecycle.plan import Table, allowed_events
from lifecycle.testing.injection import failing
from lifecycle.testing.late import LateArena
from lifecycle.testing.observe import broken_contract
from states.actor import ACTOR
from states.frozen import FROZEN

pytestmark = pytest.mark.usefixtures("few_objects")

TABLE = Table.of(FROZEN, ("actor", "ref", "old_actor"))
NEEDS_TAG = {"wake_up", "switch", "load", "tag"}
SITUATIONS = {
    "RESIDENT": lambda actor, _: None,
    "RESIDENT loading": lambda actor, _: actor._fire("load", tag="ref"),
    "RESIDENT arriving": lambda actor, _: (actor.sleep(), actor.wake_up()),
    "ASLEEP": lambda actor, _: actor.sleep(),
    "SYNCING_RESIDENT": lambda actor, sync: actor._fire("start_sync", **sync),
    "SYNCING_ASLEEP": lambda actor, sync: (actor.sleep(), actor._fire("start_sync", **sync)),
    "FAULTED": lambda actor, _: _break(actor),
    "CLOSED": lambda actor, _: actor.close(),
}
NO_ROW = "there is no such transition"
#: What may be asked for where, and where it leads; written by hand. All else has no row.
LEADS = {
    "RESIDENT": {
        ("sleep", None): "ASLEEP",
        ("wake_up", "actor"): "RESIDENT",
        ("arrive", None): "RESIDENT",
        ("load", "actor"): "RESIDENT",
        ("load", "ref"): "RESIDENT",
        ("finish_load", None): "no load is open",
        ("abort_load", None): "no load is open",
        ("adopt", None): "RESIDENT",
        ("start_sync", None): "SYNCING_RESIDENT",
        ("close", None): "CLOSED",
    },
    "ASLEEP": {
        ("sleep", None): "ASLEEP",
        ("wake_up", "actor"): "RESIDENT",
        ("start_sync", None): "SYNCING_ASLEEP",
        ("close", None): "CLOSED",
    },
    "SYNCING_RESIDENT": {
        ("finish_sync", None): "RESIDENT",
        ("fail_sync", None): "RESIDENT",
        ("close", None): "CLOSED",
    },
    "SYNCING_ASLEEP": {
        ("finish_sync", None): "ASLEEP",
        ("fail_sync", None): "ASLEEP",
        ("close", None): "CLOSED",
    },
    "FAULTED": {("recover", None): "RESIDENT", ("close", None): "CLOSED"},
    "CLOSED": {("close", None): "CLOSED"},
}
LEADS["RESIDENT loading"] = {
    **dict.fromkeys(LEADS["RESIDENT"], "a load is open"),
    ("wake_up", "actor"): "RESIDENT",
    ("arrive", None): "RESIDENT",
    ("finish_load", None): "RESIDENT",
    ("abort_load", None): "RESIDENT",
}
LEADS["RESIDENT arriving"] = LEADS["RESIDENT"]
CALLS = [
    (event.name, tag)
    for event in ACTOR.events
    if event.name != "fault"
    for tag in (("actor", "ref") if event.name in NEEDS_TAG else (None,))
]


def _break(actor):
    with failing(actor, "pause_regions"), pytest.raises(LifecycleError):
        actor.sleep()


def _make(situation):
    """A frozen actor; one whose restores may be late, where they are to be."""
    return make_frozen(memory=LateArena(poison=0xCB) if "arriving" in situation else None)


@pytest.mark.parametrize(("event", "tag"), CALLS, ids=lambda value: str(value))
@pytest.mark.parametrize("situation", SITUATIONS)
def test_pair(situation, event, tag):
    """Every event of the training actor's table ends where a frozen one's says, or is refused and changes nothing."""
    actor, _ = _make(situation)
    leads = LEADS[situation].get((event, tag), NO_ROW)
    with session(actor, engine()) as sync:
        before = weights_of(actor)
        SITUATIONS[situation](actor, sync)
        source, facts, journal = actor._machine.state, actor.facts, len(actor.journal)
        arguments = sync if event.endswith("_sync") else {"tag": tag} if tag else {}
        arguments = {**arguments, "of": "old_actor"} if event == "tag" else arguments
        if leads not in TABLE.states:
            with pytest.raises(TransitionRefused) as error:
                actor._fire(event, **arguments)
            assert (actor._machine.state, actor.facts, len(actor.journal)) == (source, facts, journal)
            assert isinstance(error.value, Faulted) == (source == "FAULTED")
            assert source == "FAULTED" or (error.value.reason == leads and _allows(error.value, source))
            return
        actor._fire(event, **arguments)

    assert actor._machine.state == leads
    assert broken_contract(actor, FROZEN.state(actor.state.name)) == []
    if actor.state.name != "CLOSED" and actor.facts.load is None and event != "finish_load":
        assert_equal_weights(before, weights_of(actor))


def _allows(error, source):
    return set(error.allowed) <= set(allowed_events(TABLE, source))


def test_all_pairs_are_asked_for():
    """The enumeration has every flat state."""
    assert {situation.split()[0] for situation in SITUATIONS} == set(TABLE.states)


@pytest.mark.parametrize("situation", [s for s in SITUATIONS if "loading" not in s])
def test_contract_of_each_state(situation):
    """Each state's contract is what the world shows."""
    actor, _ = _make(situation)
    with session(actor) as sync:
        SITUATIONS[situation](actor, sync)
        assert actor.state.arriving == ("arriving" in situation)
        assert broken_contract(actor, FROZEN.state(actor.state.name)) == []


def test_round_trips_keep_every_bit():
    """Asleep its memory is released and poisoned; awake it holds what it held, and computes what it computed."""
    actor, model = make_frozen()
    before, live = weights_of(actor), live_weights(actor)
    with torch.no_grad():
        answer = model(TOKENS)
    copied = []
    for _ in range(3):
        actor.sleep()
        assert not any(torch.equal(tensor, live[name]) for name, tensor in live_weights(actor).items())
        with pytest.raises(TransitionRefused, match="forward refused in ASLEEP"):
            model(TOKENS)
        assert_equal_weights(before, weights_of(actor))
        actor.wake_up()
        assert all(torch.equal(tensor, live[name]) for name, tensor in live_weights(actor).items())
        with torch.no_grad():
            assert torch.equal(model(TOKENS), answer)
        copied.append(actor.traffic.per_region["weights"]["device_to_host"])
    assert copied[0] == copied[-1]  # what has a copy is not copied out again


def test_sync_asleep_and_awake():
    """Its weights reach an engine from the device and from their host copy."""
    actor, _ = make_frozen(host="shared")
    assert actor.sync(engine(name="a")).source == "device"
    actor.sleep()
    assert actor.sync(engine(name="b"), tag="ref").source == "host"
    assert actor.facts.engines == {"a": actor.tags["actor"], "b": actor.tags["ref"]}


def test_what_would_train_is_refused():
    """No phase, no switch, no backward; a forward with a graph is allowed, its backward is not."""
    actor, model = make_frozen()
    with pytest.raises(TransitionRefused, match="backward refused in RESIDENT: nothing of a frozen actor trains"):
        model(TOKENS).sum().backward()
    for ask in (actor.begin_training, actor.end_training, actor.discard_grads, lambda: actor.switch("ref")):
        with pytest.raises(
            TransitionRefused, match=f"{NO_ROW}. Allowed here: sleep, wake_up, load, adopt, sync, close"
        ):
            ask()
    with pytest.raises(TransitionRefused), actor.using("ref"):
        pass
    with pytest.raises(TransitionRefused, match="step refused in RESIDENT: this machine allows it in no state"):
        actor.permit("step")
    with pytest.raises(ValueError, match="unknown event 'begin_training'"):
        actor.plan("begin_training")


def test_an_optimizer_is_refused():
    """Attaching one to a machine that never lets it step is an error, and takes nothing over."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="machine 'frozen' does not train: attach the model without its optimizer"):
        ActorLifecycle(model, optimizer, machine=FROZEN)
    ActorLifecycle(model, optimizer).close()


def test_hold_from_asleep_goes_back():
    """A scope wakes it and lets it sleep again."""
    actor, model = make_frozen()
    live = live_weights(actor)
    actor.sleep()
    with actor.hold(), torch.no_grad():
        model(TOKENS)
        assert all(torch.equal(tensor, live[name]) for name, tensor in live_weights(actor).items())
    assert actor.state.name == "ASLEEP"


def test_close_gives_the_weights_back():
    """From every state the model ends with the weights of 'actor', and works."""
    for situation in SITUATIONS:
        actor, model = make_frozen()
        live = live_weights(actor)
        with session(actor) as sync:
            SITUATIONS[situation](actor, sync)
            actor.close()
        found = dict(model.named_parameters())
        assert all(torch.equal(found[name], tensor) for name, tensor in live.items() if name in found), situation
        model(TOKENS).sum().backward()


def test_untracked_change_is_adopted():
    """What somebody wrote behind its back is refused at a sleep, and adopted on request."""
    actor, model = make_frozen()
    model.body.weight.data.add_(1.0)
    with pytest.raises(LifecycleError, match="behind the controller's back"):
        actor.sleep()
    actor.adopt()
    wanted = live_weights(actor)
    actor.sleep()
    actor.wake_up()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in live_weights(actor).items())


def test_loads_replace_versions():
    """A load makes a new version of one tag and leaves the others alone."""
    actor, model = make_frozen()
    before = weights_of(actor)
    load_noise(actor, model, "ref", 11)
    after = weights_of(actor)
    assert not torch.equal(after["ref"]["body.weight"], before["ref"]["body.weight"])
    assert_equal_weights({t: before[t] for t in ("actor", "old_actor")}, {t: after[t] for t in ("actor", "old_actor")})
