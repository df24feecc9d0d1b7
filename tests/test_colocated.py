"""Actor and engines on one device: out before in, whoever asks, and a move that stops says where everything is."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from core_engine import SMALL, CoreEngine
from rig import make_rig
from transformers import AutoModelForCausalLM

from lifecycle import ActorLifecycle, EngineError, Faulted, LifecycleConfig, SyncFailed, TransitionRefused, UnknownTag
from lifecycle.colocated import Colocated
from lifecycle.errors import MoveStopped
from lifecycle.memory.arena import ArenaBackend
from lifecycle.rollout.core import process_memory
from lifecycle.rollout.local import LocalEngine
from lifecycle.testing.engines import FakeEngine
from states.resources import Region

POOLS = ("weights", "kv_cache")


class Hanging(FakeEngine):
    """A fake that, in ``hang_on``, does not answer until ``go`` is set; then it does what it was asked, or fails."""

    def __init__(self, name):
        super().__init__(name, transports=("in_process", "shared_memory"))
        self.hang_on, self.go = "", threading.Event()

    def _enter(self, operation, *arguments):
        if operation == self.hang_on:
            self.go.wait(20)
        super()._enter(operation, *arguments)


@pytest.fixture(name="engines")
def _engines():
    return [Hanging("first"), Hanging("second")]


@pytest.fixture(name="joined")
def _joined(few_objects, engines):
    """(rig, engines, colocated): the actor has the device, engines have never held a version."""
    rig = make_rig(host="shared")
    for engine in engines:
        engine.release()
    yield rig, engines, Colocated(rig.actor, engines, timeout=5)
    for engine in engines:
        engine.go.set()


def held(colocated):
    return set(colocated.holders())


def watch(rig, engines, moves):
    """From here on, note who has memory at every call of an engine and every action of the actor that maps memory."""
    perform = rig.actor._world.perform

    def note(what):
        resident = set(rig.actor.memory.resident()) & {Region.WEIGHTS, Region.OPTIMIZER, Region.REST}
        pools = {e.name for e in engines if "resident" in e._state.snapshot()["pools"].values()}
        moves.append((what, bool(resident), bool(pools)))

    def performed(action, facts, call):
        done = perform(action, facts, call)
        if action.do in ("pause", "resume"):
            note(action.do)
        return done

    rig.actor._world.perform = performed
    for engine in engines:

        def entered(operation, *arguments, enter=engine._enter):
            enter(operation, *arguments)
            if operation != "status":
                note(operation)

        engine._enter = entered


# The two moves


def test_there_and_back(joined):
    """A trainer's cycle: at no moment both have memory, engines generate what was trained, then it trains on."""
    rig, engines, colocated = joined
    assert colocated.state.name == "TRAINING"
    rig.train()
    moves = []
    watch(rig, engines, moves)

    report = colocated.to_rollout()

    assert report.version == rig.actor.version("actor").id
    assert colocated.state.name == "ROLLOUT"
    assert colocated.holders() == {"first": POOLS, "second": POOLS}
    for engine in engines:
        assert engine.generate([[1]], max_new_tokens=1)[0]["weight_version"] == report.version
        assert all(torch.equal(engine.weights[name], rig.expected["actor"][name]) for name in engine.weights)
    colocated.to_training()
    assert colocated.state.name == "TRAINING"
    assert colocated.holders() == {"actor": ("weights", "optimizer", "rest")}
    rig.train()
    rig.check()
    assert [move for move in moves if move[1] and move[2]] == []
    order = [what for what, _, _ in moves if what not in ("check_weights", "generate")]
    assert order == [
        *["pause"] * 3,
        *["resume"] * 2,
        *["pause_generation"] * 2,
        *["flush_cache"] * 2,
        *["abort_update", "begin_update"] * 2,
        *["end_update"] * 2,
        *["continue_generation"] * 2,
        *["resume"] * 2,
        *["continue_generation"] * 2,
        *["pause_generation"] * 2,
        *["release"] * 2,
        *["resume"] * 3,
    ]


def test_bytes_really_move(few_objects):
    """With a real model in this process: the one's pages are gone before the other's come."""
    model = AutoModelForCausalLM.from_config(evolve_config(vocab_size=32768))
    engine = CoreEngine("core", evolve_config(vocab_size=32768))
    try:
        engine.release()
        actor = ActorLifecycle(model, host="shared", memory="arena", config=LifecycleConfig(verify="never"))
        colocated = Colocated(actor, [engine])
        nbytes = actor.memory.held()[Region.WEIGHTS]
        assert nbytes > 16 * 2**20
        colocated.to_rollout()  # once, so that copies and caches are there
        colocated.to_training()
        training = process_memory()["anon"]

        colocated.sleep()
        between = process_memory()["anon"]
        colocated.to_rollout()
        rollout = process_memory()["anon"]
        released = colocated.release()
        after = process_memory()["anon"]

        assert training - between > 0.9 * nbytes
        assert rollout - between > 0.9 * engine.core._weights.nbytes
        assert rollout - after > 0.9 * engine.core._weights.nbytes
        assert released["core"]["weights"] == {"state": "released", "nbytes": 0}
        colocated.to_training()
        actor.close()
    finally:
        engine.close()


def test_real_process(few_objects):
    """With an engine in a process of its own: there and back, and again after its process was killed."""
    model = AutoModelForCausalLM.from_config(SMALL)
    with LocalEngine(SMALL, threads=1) as engine:
        engine.release()
        with ActorLifecycle(model, host="shared") as actor:
            colocated = Colocated(actor, engine)
            report = colocated.to_rollout()
            assert engine.generate([[1, 2]], max_new_tokens=2)[0]["weight_version"] == report.version
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(MoveStopped, match="its process") as stopped:
                colocated.to_training()
            assert stopped.value.step == "pause_generation"
            assert colocated.state.engines["local"].startswith("unknown")
            with pytest.raises(TransitionRefused, match="local"):
                colocated.wake_up()
            engine.restart()
            colocated.to_training()
            assert (colocated.state.name, engine.status()["state"]) == ("TRAINING", "ASLEEP")


def evolve_config(**changes):
    return type(SMALL)(**{**SMALL.to_dict(), **changes})


def test_other_tags(joined):
    """to_training may wake another tag; one that is unknown, or another than the one shown, is refused first."""
    rig, engines, colocated = joined
    colocated.to_rollout()
    calls = [len(engine.calls) for engine in engines]
    with pytest.raises(UnknownTag):
        colocated.to_training("nobody")
    assert [c for e in engines for c in e.calls[calls[0] :] if c[0] != "status"] == []
    colocated.to_training("ref")
    assert (str(rig.actor.state), colocated.state.name) == ("SWITCHED(ref)", "TRAINING")
    with pytest.raises(TransitionRefused, match="switch"):
        colocated.to_training()
    rig.actor.switch("actor")
    colocated.to_training()


def test_cache_alone(joined):
    """Where only caches were released, engines go on without a sync, with the version they held."""
    _, _, colocated = joined
    colocated.to_rollout()
    colocated.release(("kv_cache",))
    assert colocated.state.name == "BETWEEN"
    assert colocated.holders() == {"first": ("weights",), "second": ("weights",)}
    assert colocated.to_rollout(sync=False) is None
    assert colocated.state.name == "ROLLOUT"


def test_engines_without_a_version(joined):
    """Without a sync, released weights stay lost: engines are awake and refuse to generate."""
    _, engines, colocated = joined
    colocated.to_rollout(sync=False)
    assert colocated.state.name == "BETWEEN"
    with pytest.raises(EngineError, match="no version"):
        engines[0].generate([[1]])


# Refusals


def test_both_in_from_the_beginning(few_objects, engines):
    """An actor and engines that both have memory are not taken together; with either out, they are."""
    rig = make_rig(host="shared")
    with pytest.raises(TransitionRefused, match=r"both have memory.*actor \(weights.*first \(weights, kv_cache\)"):
        Colocated(rig.actor, engines)
    rig.actor.sleep()
    assert Colocated(rig.actor, engines).state.name == "BETWEEN"
    with pytest.raises(ValueError, match="name of its own"):
        Colocated(rig.actor, [])
    with pytest.raises(ValueError, match="name of its own"):
        Colocated(rig.actor, [FakeEngine("a"), FakeEngine("a")])


@pytest.mark.parametrize("pools", [("weights",), ("kv_cache",), POOLS])
def test_actor_waits_for_engines(joined, pools):
    """While any engine has any pool, waking is refused for every tag, saying who has what; nothing moved."""
    rig, engines, colocated = joined
    colocated.to_rollout()
    colocated.release()
    engines[1].resume(pools)

    for tag in ("actor", "ref"):
        with pytest.raises(TransitionRefused) as refused:
            colocated.wake_up(tag)
        assert refused.value.event == "wake_up"
        assert refused.value.reason == f"engines hold memory of this device: second ({', '.join(pools)})"
        assert "release()" in refused.value.advice
    assert rig.state == "ASLEEP"
    assert colocated.device_taken() == f"second ({', '.join(pools)})"
    colocated.release()
    assert colocated.device_taken() is None
    colocated.wake_up("ref")
    assert rig.state == "SWITCHED(ref)"
    colocated.wake_up("ref")


@pytest.mark.parametrize("pools", [("weights",), ("kv_cache",), POOLS])
@pytest.mark.parametrize("tag", ["actor", "ref"])
def test_engines_wait_for_actor(joined, pools, tag):
    """While the actor has memory, also of another tag, no engine resumes anything; what is mapped may be asked for."""
    rig, engines, colocated = joined
    colocated.sleep()
    colocated.wake_up(tag)

    with pytest.raises(TransitionRefused) as refused:
        colocated.resume(pools)

    assert "the actor holds memory of this device: actor (weights, " in refused.value.reason
    assert all(engine.status()["state"] == "ASLEEP" for engine in engines)
    rig.actor.sleep()
    colocated.resume(pools)
    colocated.resume(pools)
    with pytest.raises(ValueError, match="unknown pools lora"):
        colocated.resume(("lora",))


def test_kept_regions_do_not_count(few_objects, engines):
    """What stays on the device by setting is not waited for."""
    rig = make_rig(host="shared", keep={"optimizer", "rest", "grads"})
    rig.actor.sleep()
    colocated = Colocated(rig.actor, engines)
    assert held(colocated) == {"first", "second"}
    colocated.release()
    colocated.resume()


def test_faulted_actor_counts_as_holding(joined):
    """Nobody knows what a faulted actor has mapped: engines stay out until it has recovered or closed."""
    rig, _, colocated = joined
    rig.actor.sleep()
    rig.actor._fault("ASLEEP", "read_back")

    with pytest.raises(TransitionRefused, match="the actor holds memory"):
        colocated.resume()
    with pytest.raises(Faulted):
        colocated.to_rollout()
    with pytest.raises(Faulted):
        colocated.to_training()
    rig.actor.recover()
    assert rig.state == "ASLEEP"
    colocated.resume()


@pytest.mark.parametrize("move", ["to_rollout", "sleep"])
def test_open_phase_keeps_the_actor(joined, move):
    """What sleep refuses is refused before anything has moved."""
    rig, engines, colocated = joined
    with rig.actor.training(), pytest.raises(TransitionRefused, match="training phase"):
        getattr(colocated, move)()
    assert colocated.state.name == "TRAINING"
    assert all(call[0] in ("status", "release") for engine in engines for call in engine.calls)


def test_busy_actor(joined):
    """An event of another thread is not run into: it may be about to map memory."""
    rig, _, colocated = joined
    rig.actor.sleep()
    inside, leave = threading.Event(), threading.Event()

    def occupy():
        with rig.actor._exclusive("wake_up"):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=occupy)
    thread.start()
    inside.wait(20)
    with pytest.raises(TransitionRefused, match="another thread"):
        colocated.resume()
    leave.set()
    thread.join()
    colocated.resume()


# Moves that stop


@pytest.mark.parametrize("how", ["fail_on", "die_on"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("move", "method", "step", "reached"),
    [
        ("to_rollout", "resume", "resume of weights", "ASLEEP"),
        ("to_rollout", "pause_generation", "sync", "ASLEEP"),
        ("to_rollout", "begin_update", "sync", "ASLEEP"),
        ("to_rollout", "end_update", "sync", "ASLEEP"),
        ("to_training", "pause_generation", "pause_generation", "ASLEEP"),
        ("to_training", "release", "release of kv_cache, weights", "ASLEEP"),
    ],
)
def test_engine_stops_a_move(joined, how, victim, move, method, step, reached):
    """Whichever engine fails or dies at whichever step: said where everything is, never both in, and it can go on."""
    rig, engines, colocated = joined
    rig.train()
    if move == "to_training":
        colocated.to_rollout()
    bad = engines[victim]
    getattr(bad, how).add(method)

    with pytest.raises(MoveStopped) as stopped:
        getattr(colocated, move)()

    error = stopped.value
    assert (error.move, error.step) == (move, step)
    assert "actor" in error.outcomes if step == "sync" else set(error.outcomes) == {bad.name}
    assert "again to go on" in error.advice
    assert f"actor {reached}" in error.state
    assert colocated.state.name == "BETWEEN" or (move, method) == ("to_training", "pause_generation")
    assert isinstance(error.__cause__, SyncFailed if step == "sync" else EngineError)
    assert rig.state == reached
    if how == "die_on":
        assert colocated.state.engines[bad.name].startswith("unknown (it died")
        assert "forget()" in error.advice
        with pytest.raises(TransitionRefused, match=rf"{bad.name} \(weights, kv_cache\)"):
            colocated.wake_up()
    getattr(bad, how).clear()
    if how == "die_on":
        bad.restart()
    getattr(colocated, move)()
    assert colocated.state.name == {"to_rollout": "ROLLOUT", "to_training": "TRAINING"}[move]
    rig.check()


def test_actor_stops_a_move(joined, monkeypatch):
    """An actor that can not wake leaves engines out; the same move goes on, and the other goes back."""
    _, _, colocated = joined
    colocated.to_rollout()
    monkeypatch.setattr(ArenaBackend, "available", lambda self: 0)
    for _ in range(2):
        with pytest.raises(MoveStopped, match="too little memory") as stopped:
            colocated.to_training()
        assert (stopped.value.step, colocated.state.name, held(colocated)) == ("wake_up", "BETWEEN", set())
    colocated.to_rollout()
    assert colocated.state.name == "ROLLOUT"
    monkeypatch.undo()
    colocated.to_training()


def test_wrong_options_of_a_sync(joined):
    """A sync that can not even begin stops the move like any other failure."""
    _, _, colocated = joined
    with pytest.raises(MoveStopped, match="unknown tag 'nobody'"):
        colocated.to_rollout(tag="nobody")
    with pytest.raises(MoveStopped, match="TypeError"):
        colocated.to_rollout(unheard_of=1)
    colocated.to_training()


# What is not known


def test_all_engines_are_waited_for(joined):
    """Release returns when the slowest has answered, and it says what each of them gave back."""
    _, engines, colocated = joined
    colocated.to_rollout()
    engines[1].hang_on = "release"
    threading.Timer(0.2, engines[1].go.set).start()
    began = time.monotonic()

    told = colocated.release()

    assert time.monotonic() - began >= 0.2
    assert all(pools[pool]["state"] == "released" for pools in told.values() for pool in POOLS)
    assert set(told) == {"first", "second"}


def test_late_release_is_unknown_until_it_is_seen(joined):
    """An engine that does not answer in time counts as holding its pools; it is asked again, not believed."""
    rig, engines, colocated = joined
    colocated.to_rollout()
    colocated._timeout = 0.2
    engines[1].hang_on = "release"

    with pytest.raises(MoveStopped, match="no answer within") as stopped:
        colocated.to_training()

    assert stopped.value.outcomes.keys() == {"second"}
    assert colocated.holders() == {"second": POOLS}
    with pytest.raises(TransitionRefused, match="second"):
        colocated.wake_up()
    engines[1].go.set()
    engines[1].hang_on = ""
    while colocated.device_taken():
        time.sleep(0.01)
    colocated.to_training()
    assert rig.state == "RESIDENT"


def test_late_resume_is_held_against_the_engine(joined):
    """A resume that never returned may still come: the actor stays out until a release has ended it."""
    rig, engines, colocated = joined
    colocated.sleep()
    colocated._timeout = 0.2
    engines[0].hang_on = "resume"

    with pytest.raises(MoveStopped, match="no answer"):
        colocated.resume(("weights",))

    assert engines[0].status()["pools"]["weights"]["state"] == "released"
    assert colocated.holders() == {"first": ("weights",), "second": ("weights",)}
    assert "did not end well" in colocated.state.engines["first"]
    with pytest.raises(TransitionRefused, match=r"first \(weights\)"):
        colocated.wake_up()
    engines[0].go.set()
    engines[0].hang_on = ""
    colocated._timeout = 5
    while engines[0].status()["pools"]["weights"]["state"] == "released":
        time.sleep(0.01)
    colocated.to_training()
    assert rig.state == "RESIDENT"


def test_engine_that_lies(joined):
    """A release after which the engine says that it still holds a pool is no release."""
    _, engines, colocated = joined
    colocated.to_rollout()
    engines[0].release = lambda pools: None
    with pytest.raises(MoveStopped, match="it says that weights, kv_cache is not released"):
        colocated.release()
    del engines[0].release
    colocated.release()


def test_forgotten_engine(joined):
    """An engine that is gone for good is forgotten by hand, and the others go on."""
    rig, engines, colocated = joined
    colocated.to_rollout()
    engines[0].close()
    with pytest.raises(MoveStopped):
        colocated.to_training()
    with pytest.raises(ValueError, match="unknown engine 'third'"):
        colocated.forget("third")
    colocated.forget("first")
    colocated.to_training()
    assert rig.state == "RESIDENT"
    engines[1].close()
    colocated.forget("second")
    assert "RESIDENT" in repr(colocated)


def test_unknown_engine_resumes_nothing(joined):
    """An engine that can not be asked is not told to resume while the actor has memory."""
    _, engines, colocated = joined
    engines[0].alive = False
    with pytest.raises(TransitionRefused, match="the actor holds memory"):
        colocated.resume()
    assert "resume" not in [name for engine in engines for name, _ in engine.calls]


# The page


def test_page_runs():
    """The code of the page does what the page says."""
    page = (Path(__file__).parent.parent / "docs" / "colocated.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "docs/colocated.md", "exec"), names)
    names["actor"].close()
