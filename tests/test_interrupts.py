"""Ctrl-C at every single action of every event, held back and not, on real memory: no state is torn, no tag is lost."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from rig import Net, equal, make_busy, make_rig, moments, snapshot, striking

from lifecycle import ActorLifecycle, EffectFailed
from lifecycle.executor import interrupts_held
from lifecycle.testing.engines import FakeEngine

pytestmark = pytest.mark.usefixtures("ctrl_c")


def _press():
    os.kill(os.getpid(), signal.SIGINT)


def _raise():
    raise KeyboardInterrupt


def _asleep(rig):
    rig.actor.sleep()


def _shows(tag):
    return lambda rig: rig.actor.switch(tag)


def _train(rig, pending, error=None):
    with rig.actor.training():
        rig.step()
        pending["actor"] = snapshot(rig.model)
        if error:
            raise error


def _load(rig, pending, error=None):
    with rig.actor.loading("ref"):
        rig.model.load_state_dict({**rig.model.state_dict(), **Net(seed=len(rig.actor.journal)).state_dict()})
        pending["ref"] = snapshot(rig.model)
        if error:
            raise error


def _use(rig, pending):
    with rig.actor.using("ref"):
        assert equal(snapshot(rig.model), rig.expected["ref"])


def _tag(rig, pending):
    pending["old_actor"] = rig.expected["actor"]
    rig.actor.tag("old_actor", "actor")


def _step(rig, pending):
    try:
        rig.step()
    finally:
        pending["actor"] = snapshot(rig.model)


def _adopt(rig, pending):
    version, was = rig.actor.version("actor"), rig.model.body.weight.detach().clone()
    rig.model.body.weight.data.add_(1)
    pending["actor"] = snapshot(rig.model)
    try:
        rig.actor.adopt()
    finally:
        if rig.actor.version("actor") == version:
            rig.model.body.weight.data.copy_(was)


def _sync(rig, pending):
    rig.actor.sync([FakeEngine("one", transports=("in_process",)), FakeEngine("two", transports=("in_process",))])


def _reload(rig, pending):
    rig.optimizer.load_state_dict(rig.optimizer.state_dict())


def _plain(act):
    return lambda rig, pending: act(rig.actor)


def _nothing(rig):
    pass


EVENTS = {
    "sleep": (_nothing, _plain(ActorLifecycle.sleep)),
    "sleep from ref": (_shows("ref"), _plain(ActorLifecycle.sleep)),
    "wake up": (_asleep, _plain(ActorLifecycle.wake_up)),
    "wake up ref": (_asleep, _plain(partial(ActorLifecycle.wake_up, tag="ref"))),
    "switch": (_nothing, _plain(partial(ActorLifecycle.switch, tag="ref"))),
    "switch between others": (_shows("ref"), _plain(partial(ActorLifecycle.switch, tag="old_actor"))),
    "switch home": (
        lambda rig: (rig.actor.sleep(), rig.actor.wake_up("ref")),
        _plain(partial(ActorLifecycle.switch, tag="actor")),
    ),
    "train": (_nothing, _train),
    "train and fail": (lambda rig: (rig.actor.sleep(), rig.actor.wake_up()), partial(_train, error=ValueError())),
    "load": (_nothing, _load),
    "load at ref": (_shows("ref"), _load),
    "load and fail": (_shows("old_actor"), partial(_load, error=ValueError())),
    "use": (_nothing, _use),
    "use asleep": (_asleep, _use),
    "step": (_nothing, _step),
    "discard": (lambda rig: rig.backward(), _plain(ActorLifecycle.discard_grads)),
    "tag": (_nothing, _tag),
    "adopt": (_nothing, _adopt),
    "load optimizer": (_nothing, _reload),
    "sync": (_nothing, _sync),
    "sync asleep": (_asleep, _sync),
}


def _settle(rig, pending):
    """Whole: each tag holds what it held or what the event was to give it, and nothing is left open."""
    actor = rig.actor
    for tag, weights in pending.items():
        if equal(rig.held(tag), weights):
            rig.expected[tag] = weights
    assert (actor.moving, actor.facts.load, actor.facts.scopes, actor.facts.leases) == (None, None, (), ())
    rig.check(but=("actor",) if actor.facts.phase is not None else ())


def _home(rig):
    """RESIDENT with trained weights that have no copy, whatever there was before."""
    if rig.state == "ASLEEP":
        rig.actor.wake_up()
    rig.actor.switch("actor")
    rig.train()


def _raised(act, rig, pending):
    """The error that the event or its block raised and those on the way to it, with what was noted."""
    raised = {}
    try:
        act(rig, pending)
    except (KeyboardInterrupt, ValueError) as caught:
        error = caught
        while error is not None:
            raised[type(error)] = "".join(getattr(error, "__notes__", ()))
            error = error.__context__
    return raised


@pytest.mark.parametrize("event", EVENTS)
def test_ctrl_c_is_held_back(rig, event):
    """It arrives when the event is whole: committed, its block left; what comes next works."""
    prepare, act = EVENTS[event]
    for number in range(100):
        pending = {}
        prepare(rig)
        with striking(rig.actor, _press, number) as strike:
            raised = _raised(act, rig, pending)
        assert (KeyboardInterrupt in raised) == (strike.at is not None)
        _settle(rig, pending)
        _home(rig)
        if strike.at is None:
            break

    assert number > 0
    assert not any(record.kind in ("unwind", "fault") for record in rig.actor.journal)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("event", EVENTS)
def test_interrupt_inside(rig, event, when):
    """Even one that is raised in the middle leaves the state it found, or FAULTED, from which recover() brings all."""
    prepare, act = EVENTS[event]
    for number in range(100):
        pending, tags = {}, rig.actor.tags
        prepare(rig)
        with striking(rig.actor, _raise, number, when) as strike:
            raised = _raised(act, rig, pending)
        assert strike.at is None or KeyboardInterrupt in raised
        if rig.state.startswith("FAULTED"):
            assert strike.at[1] in rig.state
            rig.actor.recover()
        if rig.actor.facts.phase is not None and strike.at[0] in ("end_training", "abort_training"):
            rig.actor.abort_training()
        if rig.actor.facts.load is not None:
            assert strike.at[0] == "abort_load"
            rig.actor._fire("abort_load")
        if rig.actor.facts.backward_seen:
            rig.actor.discard_grads()
        assert rig.actor.tags.keys() == tags.keys()
        _settle(rig, pending)
        before = moments(rig.optimizer) if rig.state == "RESIDENT" else None
        rig.actor.sleep()
        rig.actor.wake_up()
        assert before is None or equal(moments(rig.optimizer), before)
        _home(rig)
        if strike.at is None:
            break

    assert number > 0


@pytest.mark.parametrize("state", ["RESIDENT", "SWITCHED", "ASLEEP"])
@pytest.mark.parametrize("blow", [_press, _raise])
def test_closing(few_objects, state, blow):
    """An interrupted close is closed, or can be closed; the model has the actor's weights."""
    for number in range(100):
        rig = make_busy(make_rig())
        {"RESIDENT": _nothing, "SWITCHED": _shows("ref"), "ASLEEP": _asleep}[state](rig)
        with striking(rig.actor, blow, number) as strike:
            try:
                rig.actor.close()
            except KeyboardInterrupt:
                assert strike.at is not None
        rig.actor.close()
        assert rig.state == "CLOSED"
        assert equal(snapshot(rig.model), rig.expected["actor"])
        rig.step()
        if strike.at is None:
            break

    assert number > 0


@pytest.mark.parametrize("blow", [_press, _raise])
def test_recovering(rig, blow):
    """An interrupted recovery has recovered, or can be repeated."""
    for number in range(100):
        rig.actor.memory.copy_in = None
        with pytest.raises(EffectFailed):
            rig.actor.switch("ref")
        del rig.actor.memory.copy_in
        with striking(rig.actor, blow, number) as strike:
            raised = _raised(lambda rig, pending: rig.actor.recover(), rig, {})
        assert (KeyboardInterrupt in raised) == (strike.at is not None)
        if rig.state != "RESIDENT":
            assert (rig.state, blow) == ("FAULTED(restore_weights)", _raise)
            rig.actor.recover()
        _settle(rig, {})
        _home(rig)
        if strike.at is None:
            break

    assert number >= 3


def test_ctrl_c_reaches_the_handler_there_was(rig):
    """A program's own handler is called, once, after the event, and stays installed."""
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, rig.state)))

    with striking(rig.actor, lambda: (_press(), _press()), "pause_regions"):
        rig.actor.sleep()

    assert seen == [(signal.SIGINT, "ASLEEP")]
    _press()
    assert len(seen) == 2


def test_ignored_ctrl_c_stays_ignored(rig):
    """A program that ignores Ctrl-C is not interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    with striking(rig.actor, _press, "pause_regions"):
        rig.actor.sleep()

    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    rig.check()


def test_handler_from_outside_python(monkeypatch):
    """One that Python did not install can not be put back by it: it is left alone."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)

    with interrupts_held() as deliver:
        deliver()
        inside = signal.signal(signal.SIGINT, before)

    assert inside is before


@pytest.mark.parametrize("scope", ["using", "hold", "weights", "training", "loading"])
def test_ctrl_c_between_entering_and_the_block(rig, scope):
    """A block that was interrupted on its way in leaves nothing behind: no scope, no lease, no phase, no load."""
    arguments = {"using": ["ref"], "loading": ["ref"]}.get(scope, [])
    rig.actor.sleep()
    if scope in ("training", "loading"):
        rig.actor.wake_up()
    before = rig.state, rig.actor.tags
    world = rig.actor._world
    read = world.read
    world.read = lambda *arguments: (_press(), read(*arguments))[1]

    with striking(rig.actor, _press, 0), pytest.raises(KeyboardInterrupt), getattr(rig.actor, scope)(*arguments):
        pytest.fail("entered")

    world.read = read
    assert (rig.state, rig.actor.tags) == before
    assert rig.actor.facts.phase is None
    _settle(rig, {})
