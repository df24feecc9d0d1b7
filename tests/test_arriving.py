"""Wakes that return while bytes are on their way: whoever needs them waits, and nobody reads what has not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep import LATE, POISON, Deep, Layer, busy, close_all, contents, late, load, poisoned
from rig import TOKENS, equal, snapshot
from torch import nn
from ways import PATHS, STREAM, wake

from lifecycle import ActorLifecycle, TransitionRefused
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.contracts import MemoryBackendContract
from lifecycle.testing.fakes import FakeMemory
from lifecycle.testing.late import LateArena
from states.frozen import FROZEN
from states.resources import VERSION_SLOTS, Slot

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_all()


class TestLateArena(MemoryBackendContract):
    def make(self) -> LateArena:
        return LateArena()


# what returns, and what is there then


def test_a_wake_returns_while_everything_is_on_its_way():
    """The state says so, no byte has come, and a forward sees all of them."""
    rig = busy()
    want = rig.model(TOKENS)

    wake(rig, stream=False)

    assert rig.state == "RESIDENT, arriving"
    assert rig.actor.state.name == "RESIDENT"
    assert poisoned(rig.model)
    assert equal(rig.model(TOKENS), want)
    assert rig.state == "RESIDENT, arriving"  # ordered behind the bytes, and not waited for
    with rig.actor.weights():
        assert rig.state == "RESIDENT"
    assert not rig.actor.state.arriving
    rig.check()


def test_a_streamed_wake_returns_with_the_first_block():
    """Embedding and first layer are there, each block comes by itself when it is called, in whatever order.

    The norm comes with the layer in the middle, the head with the embedding that it is tied to.
    """
    rig = busy(model=Deep(layers=4))
    model = rig.model
    hidden = model.embed(TOKENS)
    want = [layer(hidden) for layer in model.layers]

    wake(rig, stream=True)

    assert rig.state == "RESIDENT, arriving"
    assert equal(snapshot(model.embed), snapshot(model.head))
    assert not poisoned(nn.ModuleList([model.embed, model.head]))
    assert equal(model.layers[0](model.embed(TOKENS)), want[0])
    assert [poisoned(part) for part in (*model.layers, model.norm)] == [False, True, True, True, True]
    assert equal(model.layers[2](model.embed(TOKENS)), want[2])
    assert [poisoned(part) for part in (*model.layers, model.norm)] == [False, True, False, True, False]
    assert equal(model.layers[1](hidden), want[1])
    assert [poisoned(part) for part in (*model.layers, model.norm)] == [False, False, False, True, False]
    assert equal(model.layers[3](hidden), want[3])
    rig.check()


def test_a_second_forward_ends_the_arrival():
    """The first hides the copy; from the second on no hook stands in the way of a block."""
    rig = busy()
    want = rig.model(TOKENS)
    for stream in (False, True):
        wake(rig, stream)
        hooks = len(rig.model.layers[1].inner._forward_pre_hooks)
        assert equal(rig.model(TOKENS), want)
        assert rig.actor.state.arriving
        assert equal(rig.model(TOKENS), want)
        assert not any(slot in rig.actor.facts.arriving for slot in VERSION_SLOTS)
        assert len(rig.model.layers[1].inner._forward_pre_hooks) == hooks - 1


# every way to the bytes


@STREAM
@pytest.mark.parametrize("path", PATHS)
def test_every_way_to_the_bytes_waits_for_them(path, stream):
    """What is read, and everything that is left afterwards, is as it is where bytes are never late."""
    plain, rig = busy(ArenaBackend(POISON)), busy()
    plain.actor.sleep()
    plain.actor.wake_up()
    wake(rig, stream)

    want, got = PATHS[path](plain), PATHS[path](rig)

    assert equal(got, want)
    assert rig.actor.state.name == plain.actor.state.name
    assert rig.actor.tags.keys() == plain.actor.tags.keys()
    assert equal(contents(rig), contents(plain))


@STREAM
def test_another_tag_arrives_too(stream):
    """Woken as a reference model, without optimizer state; a switch home brings that, as late."""
    rig = busy()
    rig.actor.switch("ref")
    want = rig.model(TOKENS)
    rig.actor.switch("actor")

    wake(rig, stream, "ref")

    assert rig.state == "SWITCHED(ref), arriving"
    with torch.no_grad():
        assert equal(rig.model(TOKENS), want)
    rig.actor.switch("actor")
    assert rig.state == "RESIDENT, arriving"
    rig.train()
    rig.check()


@STREAM
def test_sleep_at_once(stream):
    """What came for nothing was read from copies that are still good."""
    rig = busy()
    wake(rig, stream)
    rig.actor.sleep()
    assert rig.state == "ASLEEP"
    rig.check()
    wake(rig, stream)
    rig.check()


@STREAM
def test_arrivals_of_a_frozen_actor(stream):
    """The machine of a reference model has the same arrivals, and no optimizer."""
    model = Deep()
    want = model(TOKENS)
    with ActorLifecycle(model, None, ("old",), late(), "pinned", machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=stream)
        assert str(actor.state) == "RESIDENT, arriving"
        with torch.no_grad():
            assert equal(model(TOKENS), want)
        actor.sleep()
        actor.wake_up(stream=stream)
        assert equal(model.state_dict(), Deep().state_dict())
        actor.wake_up()  # again: nothing to do
    assert equal(model(TOKENS), want)


@pytest.mark.parametrize("verify", ["sample", "never"])
@STREAM
def test_what_is_not_verified_comes_all_the_same(verify, stream):
    rig = busy(verify=verify)
    for _ in range(3):
        wake(rig, stream)
        rig.check()
        rig.train()


# books


def test_the_journal_tells_starts_and_arrivals():
    """Bytes are counted where they start, in the wake; the waits are events of their own."""
    rig = busy()
    rig.actor.sleep()
    before, known = rig.actor.traffic.host_to_device, rig.actor.journal[-1].seq

    rig.actor.wake_up()
    moved = rig.actor.traffic.host_to_device - before
    rig.held("actor")
    rig.actor.begin_training()

    records = [record for record in rig.actor.journal if record.seq > known]
    started = [r for r in records if r.event == "wake_up" and r.kind == "effect" and r.direction == "host_to_device"]
    assert sum(record.nbytes for record in started) == moved == rig.actor.traffic.host_to_device - before
    assert moved == sum(rig.actor._world.nbytes(slot) for slot in (*VERSION_SLOTS, Slot.OPTIMIZER))
    effects = [record for record in records if record.kind == "effect" and record.event.startswith("arrive")]
    waits = [(record.event, record.effect, record.slot, record.nbytes, record.direction) for record in effects]
    assert set(waits) == {
        *(("arrive", "await_weights", slot.value, 0, None) for slot in VERSION_SLOTS),
        ("arrive_optimizer", "await_optimizer", "optimizer", 0, None),
    }
    assert [r.event for r in records if r.kind == "commit"] == [
        "wake_up",
        "arrive",
        "arrive_optimizer",
        "begin_training",
    ]


@STREAM
def test_plans_while_arriving(stream):
    """A plan is that of the time when everything has come; it waits for nothing."""
    rig = busy()
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.held("actor")
    want = {event: rig.actor.plan(event, tag) for event, tag in (("sleep", None), ("switch", "ref"))}
    wake(rig, stream)
    for event, tag in (("sleep", None), ("switch", "ref")):
        plan = rig.actor.plan(event, tag)
        assert plan.refusal is None
        assert [(e.name, e.nbytes) for e in plan.effects] == [(e.name, e.nbytes) for e in want[event].effects]
    assert rig.actor.state.arriving
    assert poisoned(rig.model.layers[2])


@STREAM
def test_copies_stay_while_bytes_come_from_them(stream):
    """Tags move and buffers become free meanwhile: not those that are being read."""
    rig = busy(protect_copies=True)
    wake(rig, stream)

    rig.actor.tag("ref", "actor")
    rig.actor.tag("old", "ref")
    rig.expected["ref"] = rig.expected["old"] = rig.expected["actor"]

    assert rig.actor.state.arriving
    rig.check()
    rig.train()
    rig.actor.switch("ref")
    rig.check()


@STREAM
def test_a_draft_model_beside_it(stream):
    """Modules that the model does not reach are no blocks, and wait all the same."""
    draft = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, want = Deep(), draft(torch.ones(2, 8))
    with ActorLifecycle(model, None, (), late(), "pinned", extra=[("draft", draft)], machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=stream)
        assert equal(draft(torch.ones(2, 8)), want)
        assert equal(draft[1](torch.ones(2, 8)), draft[1](torch.ones(2, 8)))


# threads


class Held(LateArena):
    """One arrival comes only when the test lets it."""

    held = -1

    def __init__(self) -> None:
        super().__init__(POISON, LATE)
        self.asked, self.may = threading.Event(), threading.Event()

    def _comer(self, block):
        number, come = self.started, super()._comer(block)

        def late():
            if number == self.held:
                self.asked.set()
                assert self.may.wait(20)
            return come()

        return late


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@STREAM
def test_a_forward_beside_a_waiter(stream):
    """One thread waits for everything, another one calls a block meanwhile: it waits too, and reads no poison."""
    model = Deep().requires_grad_(True)
    model.register_buffer("bias", model.bias, persistent=False)  # all weights are of one slot
    rig = busy(Held(), model)
    memory = rig.actor.memory
    assert isinstance(memory, Held)
    want = rig.model(TOKENS)
    rig.actor.sleep()
    memory.held = memory.started + (2 if stream else 0)
    rig.actor.wake_up(stream=stream)
    waiting, held = in_thread(lambda: rig.held("actor"))
    assert memory.asked.wait(20)

    calling, forward = in_thread(lambda: rig.model(TOKENS))
    calling.join(0.2)
    assert calling.is_alive()
    memory.may.set()
    waiting.join(20)
    calling.join(20)

    assert equal(forward, [want])
    assert equal(held, [{name: rig.expected["actor"][name] for name in held[0]}])


@STREAM
def test_many_threads(stream):
    """Forwards of all of them see the bytes, whoever comes first."""
    rig = busy(when_busy="wait")
    want = rig.model(TOKENS).detach()
    for _ in range(10):
        wake(rig, stream)
        acts = [lambda: rig.model(TOKENS).detach(), lambda: rig.model(TOKENS).detach(), lambda: rig.held("ref")]
        running = [in_thread(act) for act in acts]
        for thread, _ in running:
            thread.join(20)
        assert equal([found for _, found in running], [[want], [want], [rig.expected["ref"]]])
        rig.check()


def test_forwards_are_not_refused_because_others_wait():
    """Waiting for bytes is no event that a second forward must keep away from, even where others are refused."""
    rig = busy(Held())
    memory = rig.actor.memory
    assert isinstance(memory, Held)
    want = rig.model(TOKENS)
    rig.actor.sleep()
    memory.held = memory.started + 2
    rig.actor.wake_up(stream=True)
    first, found = in_thread(lambda: rig.model(TOKENS))
    assert memory.asked.wait(20)
    waiting, _ = in_thread(lambda: rig.held("actor"))
    while rig.actor.moving is None and waiting.is_alive():
        time.sleep(0.01)
    second, also = in_thread(lambda: rig.model(TOKENS))
    second.join(0.2)
    memory.may.set()
    waiting.join(20)
    first.join(20)
    second.join(20)
    assert equal([*found, *also], [want, want])


def test_streams_on_a_backend_without_them():
    """A backend that copies at once has everything there when a streamed wake returns."""
    model = Deep()
    want = model(TOKENS)
    with ActorLifecycle(model, None, (), FakeMemory(), "pinned", machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=True)
        assert equal(model.state_dict(), Deep().state_dict())
        assert equal(model(TOKENS), want)


def test_another_wake_while_arriving():
    """The same request again has nothing to do, another tag's is refused."""
    rig = busy()
    wake(rig, stream=True)
    rig.actor.wake_up(stream=True)
    with pytest.raises(TransitionRefused):
        rig.actor.wake_up("ref")
    rig.check()


def test_weights_of_another_kind_of_layer():
    """A block that is called by its parts only."""
    rig = busy()
    inner, attention = rig.model.layers[2].inner, rig.model.layers[2].attention
    x = torch.ones(1, 2, 8)
    want = inner(x), attention(x, x, x)[0]
    wake(rig, stream=True)
    assert equal(attention(x, x, x)[0], want[1])
    assert equal(inner(x), want[0])
    assert isinstance(rig.model.layers[2], Layer)
    load(rig, "old", 5)
    rig.check()
