"""Other threads, other processes, and events from inside events: one at a time, and nobody is fooled."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from rig import TOKENS, equal, make_busy, snapshot, striking

from lifecycle import Faulted, LifecycleError, TransitionRefused
from lifecycle.testing.engines import FakeEngine

PATIENCE = 20  # seconds after which a test that waits has failed


@contextmanager
def _stopped_inside(rig, effect, event):
    """Inside, another thread's event stands in the middle of this effect; yields its future."""
    entered, go_on = threading.Event(), threading.Event()

    def stop():
        entered.set()
        assert go_on.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool, striking(rig.actor, stop, effect), ExitStack() as stack:
        stack.callback(go_on.set)
        future = pool.submit(event)
        assert entered.wait(PATIENCE)
        yield future
        go_on.set()
        future.result(PATIENCE)


EVENTS = {
    "sleep": lambda rig: rig.actor.sleep(),
    "switch": lambda rig: rig.actor.switch("old_actor"),
    "begin_training": lambda rig: rig.actor.begin_training(),
    "tag": lambda rig: rig.actor.tag("old_actor", "ref"),
    "load": lambda rig: rig.actor.loading("ref").__enter__(),
    "using": lambda rig: rig.actor.using("ref").__enter__(),
    "weights": lambda rig: rig.held("ref"),
    "sync": lambda rig: rig.actor.sync(FakeEngine(transports=("in_process",))),
    "close": lambda rig: rig.actor.close(),
    "discard_grads": lambda rig: rig.actor.discard_grads(),
    "adopt": lambda rig: rig.actor.adopt(),
    "wake_up": lambda rig: rig.actor.wake_up(),
}


@pytest.mark.parametrize("event", EVENTS)
def test_busy_is_refused(rig, event):
    """While one thread's event runs another thread's is refused, saying what runs; afterwards it is not."""
    with _stopped_inside(rig, "restore_weights", lambda: rig.actor.switch("ref")):
        with pytest.raises(TransitionRefused) as error:
            EVENTS[event](rig)
        assert "another thread is in ('switch', 'restore_weights')" in error.value.reason
        assert "when_busy='wait'" in error.value.advice

    assert rig.state == "SWITCHED(ref)"
    rig.check()


def test_busy_waits_by_setting(make):
    """With when_busy='wait' another thread's event happens after the one that runs, from the state that this leaves."""
    rig = make_busy(make(when_busy="wait"))
    waiting = threading.Event()

    def wake_up():
        waiting.set()
        rig.actor.wake_up("ref")

    with ThreadPoolExecutor(1) as pool, _stopped_inside(rig, "pause_regions", lambda: rig.actor.sleep()):
        second = pool.submit(wake_up)
        assert waiting.wait(PATIENCE)
        assert not second.done()
        assert rig.state == "RESIDENT"

    second.result(PATIENCE)
    assert rig.state == "SWITCHED(ref)"
    commits = [record.event for record in rig.actor.journal if record.kind == "commit"]
    assert commits[-2:] == ["sleep", "wake_up"]
    rig.check()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_waiting(make):
    """Who waits for another thread's event can be interrupted; the event that runs is not."""
    rig = make_busy(make(when_busy="wait"))

    def press_once_it_waits():
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it holds interrupts back while it waits
            os.sched_yield()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool, _stopped_inside(rig, "pause_regions", lambda: rig.actor.sleep()):
        pressed = pool.submit(press_once_it_waits)
        with pytest.raises(KeyboardInterrupt):
            rig.actor.wake_up()
        pressed.result(PATIENCE)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert rig.state == "ASLEEP"
    rig.check()


def test_state_is_readable_meanwhile(rig):
    """State, movement, facts, plans and the journal are read without waiting for the event that runs."""
    with _stopped_inside(rig, "pause_regions", lambda: rig.actor.sleep()):
        assert rig.state == "RESIDENT"
        assert rig.actor.moving == ("sleep", "pause_regions")
        assert rig.actor.tags.keys() == {"actor", "ref", "old_actor"}
        assert rig.actor.version("actor").id == rig.actor.tags["actor"]
        assert rig.actor.facts.copies
        assert rig.actor.journal[-1].event == "sleep"
        assert "RESIDENT" in repr(rig.actor)
        assert rig.actor.source("ref").value == "host"
        rig.actor.plan("switch", tag="ref")

    assert rig.actor.moving is None
    rig.check()


def test_forward_of_another_thread(rig):
    """A forward is refused from the moment the weights begin to go, not only once the sleep is committed."""
    with _stopped_inside(rig, "pause_regions", lambda: rig.actor.sleep()):
        rig.model(TOKENS)  # nothing is released yet
    with pytest.raises(TransitionRefused) as error:
        rig.model(TOKENS)

    assert error.value.event == "forward"


def test_two_threads_that_train_and_sleep(make):
    """Many events of two threads that wait for each other: none is torn, none is lost."""
    rig = make_busy(make(when_busy="wait"))
    barrier = threading.Barrier(2, timeout=PATIENCE)
    done = []

    def switch_about(tag):
        barrier.wait()
        for _ in range(15):
            try:
                with rig.actor.using(tag):
                    done.append(tag)
            except TransitionRefused as error:
                done.append(error.event)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(switch_about, tag) for tag in ("ref", "old_actor")]:
            future.result(PATIENCE)

    assert sorted(done) == ["old_actor"] * 15 + ["ref"] * 15
    assert (rig.state, rig.actor.facts.scopes) == ("RESIDENT", ())
    rig.check()


@pytest.mark.parametrize("asleep", [False, True])
def test_scopes_left_out_of_order(rig, asleep):
    """Two threads' scopes may end in any order: the last one out goes back to where the first one found the actor."""
    if asleep:
        rig.actor.sleep()
    inside, leave = threading.Event(), threading.Event()

    def first():
        with rig.actor.using("ref"):
            inside.set()
            assert leave.wait(PATIENCE)
        return rig.state

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(first)
        assert inside.wait(PATIENCE)
        with rig.actor.using("old_actor"):
            assert rig.state == "SWITCHED(old_actor)"
            leave.set()
            assert future.result(PATIENCE) == "SWITCHED(old_actor)"
            assert equal(snapshot(rig.model), rig.expected["old_actor"])

    assert rig.state == ("ASLEEP" if asleep else "RESIDENT")
    rig.check()


def test_nested_scopes(rig):
    """Nested users wake once; each goes back to what the one around it shows, and the outermost back to sleep."""
    rig.actor.sleep()
    with rig.actor.hold():
        with rig.actor.using("ref"), rig.actor.using("ref"):
            assert equal(snapshot(rig.model), rig.expected["ref"])
        assert rig.state == "RESIDENT"
        rig.train()
        with rig.actor.using("old_actor"), pytest.raises(TransitionRefused):
            rig.actor.sleep()
        rig.check()

    assert rig.state == "ASLEEP"
    wakes = [r for r in rig.actor.journal if (r.kind, r.event) == ("commit", "wake_up")]
    assert len(wakes) == 1
    rig.check()


def test_scope_of_a_faulted_actor(rig):
    """A scope whose inside broke the actor is left with the error of the inside; recovery finds no scope open."""

    def fail():
        with rig.actor.using("ref"):
            rig.actor.memory.copy_in = None
            rig.actor.switch("old_actor")

    with pytest.raises(LifecycleError) as error:
        fail()
    del rig.actor.memory.copy_in

    assert not isinstance(error.value, Faulted)
    assert (rig.state, rig.actor.facts.scopes) == ("FAULTED(restore_weights)", ())
    rig.actor.recover()
    rig.check()


# from inside


@pytest.mark.parametrize("event", EVENTS)
def test_event_from_inside_an_effect(rig, event):
    """An event that an effect asks for is refused, and the event whose effect it is goes on."""
    caught = []

    def ask():
        with pytest.raises(TransitionRefused) as error:
            EVENTS[event](rig)
        caught.append(error.value)

    with striking(rig.actor, ask, "restore_weights"):
        rig.actor.switch("ref")

    assert "asked from inside ('switch', 'restore_weights')" in caught[0].reason
    assert rig.state == "SWITCHED(ref)"
    rig.check()


# processes


def _in_a_fork(child):
    """Run in a forked process; returns what it returned, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = str(child())
        except BaseException:
            told = traceback.format_exc()
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("asleep", [False, True])
def test_fork(make, asleep):
    """A forked process may look and may not move: every event is refused there, and the actor does not notice it."""
    rig = make_busy(make(host="shared", protect_copies=True))
    if asleep:
        rig.actor.sleep()

    def child():
        refused = []
        for event, ask in EVENTS.items():
            try:
                ask(rig)
            except TransitionRefused as error:
                refused += [event] if "forked" in error.reason else []
        assert refused == list(EVENTS), refused
        if not asleep:
            rig.model(TOKENS[:1])
            with pytest.raises(TransitionRefused, match="forked"):
                rig.optimizer.step()
        return f"{rig.state} {rig.actor.moving} {rig.actor.tags['ref']} {rig.actor.source('ref')}"

    told = _in_a_fork(child)

    assert told == f"{rig.state} None {rig.actor.tags['ref']} host"
    rig.check()
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.train()
    rig.check()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_during_an_event(rig):
    """A process forked in the middle of an event does not wait for a lock that nobody there will give back."""
    told = []
    with striking(rig.actor, lambda: told.append(_in_a_fork(lambda: _asked(rig))), "restore_weights"):
        rig.actor.switch("ref")

    assert "forked" in told[0]
    assert rig.state == "SWITCHED(ref)"
    rig.check()


def _asked(rig):
    with pytest.raises(TransitionRefused) as error:
        rig.actor.sleep()
    return error.value.reason


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_child_that_writes(make):
    """What a forked process writes into its own memory, weights and copies alike, is not the actor's."""
    rig = make_busy(make(host="pinned"))

    def child():
        with torch.no_grad():
            for parameter in rig.model.parameters():
                parameter.zero_()
        return "wrote"

    assert _in_a_fork(child) == "wrote"
    rig.check()
    rig.actor.sleep()
    assert _in_a_fork(child) == "wrote"
    rig.actor.wake_up()
    rig.check()
