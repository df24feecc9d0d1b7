"""What could not be undone: FAULTED says by which effect; recover() brings back every tag, or names what is lost."""

from __future__ import annotations

import errno
from contextlib import contextmanager

import pytest
import torch
from rig import TOKENS, Net, equal, moments, snapshot, striking

from lifecycle import EffectFailed, Faulted, NoReadableCopy, TransitionRefused
from lifecycle.testing.engines import FakeEngine
from states.resources import Region


@contextmanager
def _broken(owner, method, *, good=0):
    """Inside, the method works ``good`` times and then no more."""
    works, calls = getattr(owner, method), []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) > good:
            raise OSError(errno.EIO, f"{method} is broken")
        return works(*arguments)

    setattr(owner, method, broken)
    try:
        yield
    finally:
        delattr(owner, method)


def _wake(rig):
    rig.actor.sleep()
    rig.actor.wake_up()


def _abort(rig):
    rig.actor.begin_training()
    rig.step()
    rig.actor.memory.copy_in = _raise_eio
    rig.actor.abort_training()


def _raise_eio(*arguments):
    raise OSError(errno.EIO, "copy_in is broken")


def _load(rig):
    with rig.actor.loading("ref"):
        rig.model.load_state_dict({**rig.model.state_dict(), **Net(seed=8).state_dict()})
        rig.expected["ref"] = snapshot(rig.model)


#: name -> (before, what is broken after how many calls, the event, the effect it stops in, the state to come back to)
FAULTS = {
    "sleep, nothing released": (None, "pause", 0, lambda r: r.actor.sleep(), "pause_regions", "RESIDENT"),
    "sleep, weights released": (None, "pause", 1, lambda r: r.actor.sleep(), "pause_regions", "ASLEEP"),
    "sleep, rest left": (None, "pause", 2, lambda r: r.actor.sleep(), "pause_regions", "ASLEEP"),
    "sleep while switched": (
        lambda r: r.actor.switch("ref"),
        "pause",
        1,
        lambda r: r.actor.sleep(),
        "pause_regions",
        "ASLEEP",
    ),
    "switch": (None, "copy_in", 0, lambda r: r.actor.switch("ref"), "restore_weights", "RESIDENT"),
    "switch, half-way": (None, "copy_in", 1, lambda r: r.actor.switch("ref"), "restore_weights", "RESIDENT"),
    "switch between others": (
        lambda r: r.actor.switch("ref"),
        "copy_in",
        1,
        lambda r: r.actor.switch("old_actor"),
        "restore_weights",
        "RESIDENT",
    ),
    "switch home": (
        lambda r: (r.actor.sleep(), r.actor.wake_up("ref")),
        "copy_in",
        2,
        lambda r: r.actor.switch("actor"),
        "restore_weights",
        "RESIDENT",
    ),
    "abort": (_wake, "copy_out", 0, _abort, "restore_base", "RESIDENT"),
    "finish load": (_wake, "copy_in", 0, _load, "restore_weights", "RESIDENT"),
    "using": (None, "copy_in", 0, lambda r: r.actor.using("ref").__enter__(), "restore_weights", "RESIDENT"),
}


def _faulted(rig, fault):
    """Bring the actor to FAULTED; returns the error, and the moments it must come back with."""
    before, method, good, event, _, _ = FAULTS[fault]
    held = moments(rig.optimizer)
    if before is not None:
        before(rig)
    with _broken(rig.actor.memory, method, good=good), pytest.raises(EffectFailed) as error:
        event(rig)
    if "copy_in" in vars(rig.actor.memory):
        del rig.actor.memory.copy_in
    return error.value, held


@pytest.mark.parametrize("fault", FAULTS)
def test_recover(rig, fault):
    """Every tag and the optimizer's state come back bit for bit, into the state that what is left allows."""
    error, before = _faulted(rig, fault)
    effect, target = FAULTS[fault][-2:]
    assert (error.effect, error.rolled_back, error.state) == (effect, False, f"FAULTED({effect})")
    assert (rig.state, rig.actor.state.effect, rig.actor.moving) == (f"FAULTED({effect})", effect, None)

    rig.actor.recover()

    assert rig.state == target
    rig.check()
    if target == "ASLEEP":
        assert not any(rig.actor.memory.held().values())
        rig.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    rig.check()
    rig.train()
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.check()


@pytest.mark.parametrize("fault", ["sleep, weights released", "switch, half-way"])
def test_what_a_faulted_actor_refuses(rig, fault):
    """Everything but recover() and close() is refused by the effect that failed, and so is plain PyTorch."""
    error, _ = _faulted(rig, fault)
    events = {
        "sleep": rig.actor.sleep,
        "wake_up(actor)": rig.actor.wake_up,
        "switch(ref)": lambda: rig.actor.switch("ref"),
        "begin_training": rig.actor.begin_training,
        "end_training": rig.actor.end_training,
        "abort_training": rig.actor.abort_training,
        "discard_grads": rig.actor.discard_grads,
        "tag(ref)": lambda: rig.actor.tag("ref", "old_actor"),
        "load(ref)": lambda: rig.actor.loading("ref").__enter__(),
        "adopt": rig.actor.adopt,
        "start_sync(actor)": lambda: rig.actor.sync(FakeEngine(transports=("in_process",))),
        "weights": lambda: rig.held("actor"),
        "forward": lambda: rig.model(TOKENS),
        "step": rig.optimizer.step,
        "state_dict": rig.model.state_dict,
        "load_state_dict": lambda: rig.model.load_state_dict({}),
        "optimizer_state_dict": rig.optimizer.state_dict,
        "load_optimizer_state_dict": lambda: rig.optimizer.load_state_dict({}),
    }
    facts = rig.actor.facts

    for event, ask in events.items():
        with pytest.raises(Faulted) as refused:
            ask()
        assert refused.value.event.split("(")[0] == event.split("(")[0]
        assert (refused.value.effect, refused.value.allowed) == (error.effect, ("recover", "close"))
        assert refused.value.lost == ()
    assert isinstance(rig.actor.plan("sleep").refusal, Faulted)
    assert rig.actor.facts == facts
    rig.actor.recover()
    rig.check()
    if rig.state == "RESIDENT":
        rig.model(TOKENS)


def test_recover_without_a_fault(rig):
    """Where nothing is broken there is nothing to recover from."""
    with pytest.raises(TransitionRefused, match="no such transition") as error:
        rig.actor.recover()

    assert (error.value.event, error.value.state) == ("recover", "RESIDENT")
    rig.check()


@pytest.mark.parametrize("method", ["copy_in", "fingerprints", "collect"])
def test_recover_that_fails_can_be_repeated(rig, method):
    """While what broke is still broken recover() says so; once it works, nothing was lost by trying."""
    _faulted(rig, "sleep, weights released" if method == "collect" else "switch, half-way")

    for _ in range(2):
        with _broken(rig.actor.memory, method), pytest.raises(Faulted) as error:
            rig.actor.recover()
        assert (error.value.event, error.value.lost) == ("recover", ())
        assert rig.state.startswith("FAULTED")

    rig.actor.recover()
    rig.check()


def test_lost_tags_are_named(make):
    """What had its only copy on a device that now holds something else is lost: named, not replaced by a guess."""
    rig = make()
    rig.load("ref", seed=1)
    rig.train()
    rig.backward()
    with _broken(rig.actor._world.adapter, "discard_grads"), pytest.raises(EffectFailed):
        rig.actor.discard_grads()
    rig.model.body.weight.data.add_(1)

    with pytest.raises(Faulted) as error:
        rig.actor.recover()

    assert (error.value.event, error.value.effect, error.value.lost) == ("recover", "check_copies", ("actor",))
    assert isinstance(error.value.__cause__, NoReadableCopy)
    assert error.value.__cause__.tag == "actor"
    assert rig.state == "FAULTED(discard_grads)"
    with pytest.raises(NoReadableCopy) as unreadable:
        rig.actor.source("actor")
    assert (unreadable.value.tag, unreadable.value.version) == ("actor", rig.actor.version("actor").id)
    assert unreadable.value.copies["trained"] == []
    assert str(rig.actor.source("ref")) == "host"
    with pytest.raises(Faulted, match="actor"):
        rig.actor.sync(FakeEngine(transports=("in_process",)))

    rig.model.body.weight.data.copy_(rig.expected["actor"]["body.weight"])  # the bytes are what counts
    rig.actor.recover()
    rig.check()


def test_sync_without_a_readable_copy(rig):
    """A version that is nowhere can not be sent: refused before an engine is paused, and the state stays."""
    rig.actor.switch("ref")
    engine = FakeEngine(transports=("in_process",))
    facts = rig.actor.facts
    gone = {part for slot, part in facts.version_of("actor").parts.items() if slot == "trained"}
    rig.actor._executor.facts = type(facts)(
        **{**{f: getattr(facts, f) for f in facts.__slots__ if not f.startswith("__")}, "copies": _but(facts, gone)}
    )

    with pytest.raises(NoReadableCopy) as error:
        rig.actor.sync(engine)
    assert isinstance(rig.actor.plan("switch", tag="actor").refusal, NoReadableCopy)

    assert (error.value.tag, error.value.version) == ("actor", facts.tags["actor"])
    assert error.value.copies["trained"] == []
    assert (rig.state, engine.calls) == ("SWITCHED(ref)", [])
    rig.actor._executor.facts = facts
    rig.check()


def _but(facts, gone):
    return {part: copy for part, copy in facts.copies.items() if part not in gone}


# closing


def _open_phase(rig):
    _wake(rig)
    rig.actor.begin_training()
    rig.step()


def _open_load(rig):
    rig.actor._fire("load", tag="old_actor")
    rig.model.load_state_dict({**rig.model.state_dict(), **Net(seed=8).state_dict()})


CLOSING = {
    "RESIDENT": lambda rig: None,
    "an open phase": _open_phase,
    "an open load": _open_load,
    "an open load while switched": lambda rig: (rig.actor.switch("ref"), _open_load(rig)),
    "an open scope": lambda rig: rig.actor._enter_scope("ref"),
    "SWITCHED": lambda rig: rig.actor.switch("ref"),
    "ASLEEP": lambda rig: rig.actor.sleep(),
    "awake for another": lambda rig: (rig.actor.sleep(), rig.actor.wake_up("ref")),
    **{f"FAULTED: {fault}": lambda rig, fault=fault: _faulted(rig, fault) for fault in FAULTS},
}


@pytest.mark.parametrize("situation", CLOSING)
def test_close(rig, situation):
    """Wherever it is closed, the model has the actor's weights and is an ordinary model again; once is enough."""
    before = moments(rig.optimizer)
    CLOSING[situation](rig)

    rig.actor.close()
    rig.actor.close()

    assert rig.state == "CLOSED"
    assert equal(snapshot(rig.model), rig.expected["actor"])
    assert equal(moments(rig.optimizer), before)
    assert rig.actor._world.pool.allocated_bytes == 0
    rig.step()
    rig.model.load_state_dict(rig.model.state_dict())
    assert not equal(snapshot(rig.model), rig.expected["actor"])
    with pytest.raises(TransitionRefused) as error:
        rig.actor.sleep()
    assert (error.value.state, error.value.allowed) == ("CLOSED", ("close",))
    with pytest.raises(TransitionRefused):
        rig.held("actor")


@pytest.mark.parametrize("way_out", ["recover", "close"])
def test_first_phase_whose_abort_faulted(make, way_out):
    """Optimizer state that an aborted first phase made is taken away by whatever ends the fault."""
    rig = make()
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.actor.begin_training()
    rig.step()
    with _broken(rig.actor.memory, "copy_in"), pytest.raises(EffectFailed):
        rig.actor.abort_training()
    assert rig.state == "FAULTED(restore_base)"

    getattr(rig.actor, way_out)()

    assert moments(rig.optimizer) == []
    assert equal(snapshot(rig.model), rig.expected["actor"])


def test_closing_while_weights_are_read(rig):
    """A reader keeps what it reads: close is refused until it has left."""
    rig.actor.sleep()
    with rig.actor.weights("ref") as weights:
        with pytest.raises(TransitionRefused, match=r"weights\(\) block is open"):
            rig.actor.close()
        assert equal(dict(weights), rig.expected["ref"])

    rig.actor.close()
    assert rig.state == "CLOSED"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("effect", ["remove_hooks", "free_copies"])
def test_close_that_fails(rig, effect, when):
    """A close that stopped half-way is FAULTED. Once the hooks are off only close() is left, and it ends the job."""
    with striking(rig.actor, _raise_eio, effect, when), pytest.raises(EffectFailed) as error:
        rig.actor.close()
    assert (error.value.event, error.value.effect, error.value.rolled_back) == ("close", effect, False)
    assert rig.state == f"FAULTED({effect})"

    if (effect, when) == ("remove_hooks", "before"):
        rig.actor.recover()
        rig.check()
    else:
        with pytest.raises(TransitionRefused, match=r"closing had begun.*Call close\(\) again"):
            rig.actor.recover()
    rig.actor.close()

    assert rig.state == "CLOSED"
    assert equal(snapshot(rig.model), rig.expected["actor"])
    rig.step()


def test_context_manager(rig):
    """Leaving the with-block closes, also by an exception, also from ASLEEP."""

    def fail():
        with rig.actor:
            rig.actor.sleep()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert rig.state == "CLOSED"
    assert equal(snapshot(rig.model), rig.expected["actor"])
    assert torch.isfinite(rig.model(TOKENS)).all()


def test_memory_is_released_after_recovery(rig):
    """What was half released is released: asleep after a recovery, the device's bytes are gone for good."""
    _faulted(rig, "sleep, rest left")

    rig.actor.recover()

    assert rig.state == "ASLEEP"
    assert rig.actor.memory.held()[Region.WEIGHTS] == 0
    poison = torch.full((1,), 0xCB, dtype=torch.uint8)
    for parameter in rig.model.parameters():
        assert (parameter.data.view(torch.uint8) == poison).all()
