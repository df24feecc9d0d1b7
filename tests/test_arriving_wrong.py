"""Bytes that come wrong or not at all, and waits that are interrupted: who hears of it, and what is left."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from deep import Deep, arena, busy, close_all, contents, late
from rig import TOKENS, Rig, adam, equal, striking
from ways import PATHS, STREAM, wake

from lifecycle import ActorLifecycle, Faulted
from lifecycle.errors import EffectFailed, VerificationFailed
from lifecycle.hoststore.base import tensor_over
from states.actor import ACTOR
from states.extend import Insert, extended
from states.resources import Slot

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_all()


def last(rig: Rig) -> int:
    """The number of the next wake's last block: that of the last layer."""
    return arena(rig).started + len(rig.model.layers) - 1


@pytest.mark.parametrize("trouble", ["flipping", "failing"])
def test_a_late_failure_is_the_waiters(trouble):
    """Earlier blocks run; the forward of the wrong one raises, and recover() makes everything whole from the copies."""
    rig = busy()
    want = rig.model(TOKENS)
    rig.actor.sleep()
    getattr(arena(rig), trouble).add(last(rig))
    rig.actor.wake_up(stream=True)
    hidden = rig.model.embed(TOKENS)
    for layer in list(rig.model.layers)[:2]:
        hidden = layer(hidden)

    with pytest.raises(EffectFailed) as caught:
        rig.model.layers[2](hidden)

    assert isinstance(caught.value.__cause__, VerificationFailed if trouble == "flipping" else RuntimeError)
    assert rig.state == "FAULTED(await_weights)"
    for call in (lambda: rig.model.layers[2](hidden), lambda: rig.model(TOKENS), rig.model.state_dict, rig.actor.sleep):
        with pytest.raises(Faulted):
            call()
    rig.actor.recover()
    assert rig.state == "RESIDENT"
    rig.check()
    assert equal(rig.model(TOKENS), want)
    wake(rig, stream=True)
    rig.check()


@pytest.mark.parametrize("trouble", ["flipping", "failing"])
@pytest.mark.parametrize("waiter", ["weights", "sleep", "switch", "state_dict", "close"])
@STREAM
def test_every_waiter_hears_of_it(trouble, waiter, stream):
    """In whatever way the bytes are waited for; close() has brought everything back where it is forced."""
    rig = busy()
    want = contents(rig)
    rig.actor.sleep()
    number = last(rig) if stream else arena(rig).started
    getattr(arena(rig), trouble).add(number)
    rig.actor.wake_up(stream=stream)

    with pytest.raises(EffectFailed):
        PATHS[waiter](rig)

    assert rig.state == "FAULTED(await_weights)"
    if waiter == "close":
        rig.actor.close()
        assert equal(contents(rig), {"optimizer": want["optimizer"], "model": want["model"]})
    else:
        rig.actor.recover()
        assert equal(contents(rig), want)


def test_optimizer_state_that_comes_wrong():
    """Found by whoever needs it; forwards do not."""
    rig = busy()
    want, forward = contents(rig), rig.model(TOKENS)
    rig.actor.sleep()
    arena(rig).flipping.add(last(rig) + 1)
    rig.actor.wake_up(stream=True)
    assert equal(rig.model(TOKENS), forward)
    with pytest.raises(EffectFailed):
        rig.optimizer.state_dict()
    assert rig.state == "FAULTED(await_optimizer)"
    rig.actor.recover()
    assert equal(contents(rig), want)


@pytest.mark.parametrize("trouble", ["flipping", "failing"])
def test_a_wrong_first_block_leaves_the_actor_asleep(trouble):
    """The wake itself finds it; nothing is lost, and the next one succeeds."""
    rig = busy()
    rig.actor.sleep()
    getattr(arena(rig), trouble).add(arena(rig).started)

    with pytest.raises((VerificationFailed, EffectFailed)) as caught:
        rig.actor.wake_up(stream=True)

    if trouble == "flipping":
        assert "layers.0.frozen.weight" in str(caught.value)
    assert rig.state == "ASLEEP"
    assert rig.actor.journal[-1].kind == "unwind"
    assert rig.actor.journal[-1].effect == "restore_weights"
    rig.check()
    for stream in (True, False):
        wake(rig, stream)
        rig.check()
    rig.train()


def test_a_spoiled_copy_is_named():
    """There is no other copy of the actor's weights: recover() says whose are lost, and the others are kept."""
    rig = busy()
    rig.actor.sleep()
    world, facts = rig.actor._world, rig.actor.facts
    part = facts.version_of("actor").parts[Slot.TRAINED]
    place = next(t.offset for t in world.backend.layout(Slot.TRAINED) if t.name == "layers.2.inner.weight")
    tensor_over(world.buffers[part])[place] ^= 1
    rig.actor.wake_up(stream=True)

    with pytest.raises(EffectFailed, match=r"layers\.2\.inner\.weight"):
        rig.model(TOKENS)

    with pytest.raises(Faulted):
        rig.actor.recover()
    assert rig.state.startswith("FAULTED")
    rig.actor.close(force=True)


@STREAM
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_waits(stream):
    """Ctrl-C while bytes are waited for is delivered when they have come."""
    rig = busy()
    wake(rig, stream)

    with (
        striking(rig.actor, lambda: os.kill(os.getpid(), signal.SIGINT), "await_weights"),
        pytest.raises(KeyboardInterrupt),
    ):
        rig.held("actor")

    assert rig.state in ("RESIDENT", "RESIDENT, arriving")
    rig.check()


def test_an_interrupted_block():
    """A forward that is interrupted while it waits for its block can be called again."""
    rig = busy()
    want = rig.model(TOKENS)
    wake(rig, stream=True)
    flight = arena(rig).flights[1]
    wait, flight.wait = flight.wait, _interrupted

    with pytest.raises(KeyboardInterrupt):
        rig.model(TOKENS)

    flight.wait = wait
    assert equal(rig.model(TOKENS), want)
    rig.check()


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_a_row_that_waits_itself_leaves_no_hooks():
    """A machine may wait in its own wake for what it has streamed: nothing waits any more afterwards."""
    waits = [
        Insert("await_weights", "wake_up", after="restore_weights", target="RESIDENT"),
        Insert("await_optimizer", "wake_up", after="restore_optimizer", target="RESIDENT"),
    ]
    model = Deep()
    machine = extended(ACTOR, "waiting", insert=waits)
    with ActorLifecycle(model, adam(model), ("ref",), late(), "pinned", machine=machine) as actor:
        hidden = torch.ones(1, 4, 8)
        want = model.layers[1].inner(hidden).detach()
        actor.sleep()
        actor.wake_up(stream=True)
        assert not actor.state.arriving
        assert not actor._world.adapter._hooks._waits
        actor.sleep()
        actor.wake_up("ref")
        assert torch.equal(model.layers[1].inner(hidden), want)
