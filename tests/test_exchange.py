"""Switches that move both ways at once: what is half moved is nowhere lost, whatever stops it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deep import LATE, POISON, Deep, arena, busy, close_all, contents, load
from rig import TOKENS, Rig, equal, snapshot, striking

from lifecycle import Faulted, TransitionRefused
from lifecycle.attach import make_store
from lifecycle.errors import EffectFailed, VerificationFailed
from lifecycle.hoststore.base import tensor_over
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.late import LateArena
from lifecycle.testing.trouble import FlakyStore
from states.resources import VERSION_SLOTS, Copy, Slot

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_all()


CHUNK = 512
ERRORS = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


def dirty(**settings: Any) -> Rig:
    """The actor's trained weights are on the device alone, those of 'ref' in host memory; copies are read-only."""
    return busy(LateArena(POISON, LATE, CHUNK), protect_copies=True, **settings)


@contextmanager
def stopping(rig: Rig, what: str, number: int, error: type[BaseException] = RuntimeError) -> Iterator[list[str]]:
    """Inside, an exchange (or its end) is stopped before this chunk, each time. Yields what was stopped."""
    stopped: list[str] = []

    def at_chunk(now: str, at: int) -> None:
        if (now, at) == (what, number):
            stopped.append(what)
            raise error(f"{what} stopped at chunk {at}")

    arena(rig).at_chunk = at_chunk
    yield stopped
    arena(rig).at_chunk = lambda what, number: None


def part_of(rig: Rig, tag: str, slot: Slot = Slot.TRAINED) -> int:
    return rig.actor.facts.version_of(tag).parts[slot]


def spoil(rig: Rig, tag: str) -> None:
    """One bit of the tag's copy."""
    world = rig.actor._world
    buffer = world.buffers[part_of(rig, tag)]
    world.pool.unseal(buffer)
    tensor_over(buffer)[0] ^= 1
    world.pool.seal(buffer)


def test_both_ways_at_once():
    """What has no other copy goes out while its successor comes in: as many bytes as on a backend that can not."""
    plain, rig = busy(ArenaBackend(POISON)), dirty()
    nbytes = rig.actor._world.nbytes(Slot.TRAINED)
    before = [(r.actor.traffic.device_to_host, r.actor.traffic.host_to_device) for r in (plain, rig)]
    planned = rig.actor.plan("switch", "ref")

    plain.actor.switch("ref")
    rig.actor.switch("ref")

    moved = [(r.actor.traffic.device_to_host, r.actor.traffic.host_to_device) for r in (plain, rig)]
    assert moved[0][0] - before[0][0] == moved[1][0] - before[1][0] == nbytes
    assert moved[0][1] - before[0][1] == moved[1][1] - before[1][1] >= nbytes
    assert planned.nbytes == moved[1][0] - before[1][0] + moved[1][1] - before[1][1]
    records = [r for r in rig.actor.journal if r.event == "switch" and r.direction == "both"]
    assert [(r.effect, r.slot, r.tag, r.nbytes, r.part) for r in records] == [
        ("exchange_weights", "trained", "ref", nbytes, part_of(rig, "actor"))
    ]
    assert equal(contents(rig), contents(plain))
    for r in (plain, rig):
        r.check()


def test_the_way_back_moves_one_way():
    """What went out has its copy, and so has what is left: nothing goes out again, and nothing is exchanged."""
    rig = dirty()
    rig.actor.switch("ref")
    out = rig.actor.traffic.device_to_host
    rig.actor.switch("actor")
    rig.actor.switch("ref")
    assert rig.actor.traffic.device_to_host == out
    rig.check()


def test_equal_parts_stay():
    """Of a version that differs in what was trained alone, what is frozen is left where it is."""
    rig = dirty()
    rig.actor.tag("old", "actor")
    rig.expected["old"] = rig.expected["actor"]
    rig.train()
    before = rig.actor.traffic.device_to_host, rig.actor.traffic.host_to_device
    frozen = part_of(rig, "actor", Slot.FROZEN)

    rig.actor.switch("old")

    nbytes = rig.actor._world.nbytes(Slot.TRAINED)
    after = rig.actor.traffic.device_to_host, rig.actor.traffic.host_to_device
    assert (after[0] - before[0], after[1] - before[1]) == (nbytes, nbytes)
    assert part_of(rig, "old", Slot.FROZEN) == frozen
    rig.check()


# the same as without


Step = Callable[[Rig, int], object]


def _train(rig: Rig, seed: int) -> None:
    rig.train(1 + seed % 2)


def _forward(rig: Rig, seed: int) -> Any:
    with torch.no_grad():
        return rig.model(TOKENS).clone()


STEPS: list[Step] = [
    _train,
    _train,
    _forward,
    lambda rig, seed: rig.actor.sleep(),
    lambda rig, seed: rig.actor.wake_up(("actor", "ref", "old")[seed % 3], stream=bool(seed & 4)),
    lambda rig, seed: rig.actor.wake_up("actor", stream=bool(seed & 4)),
    *[lambda rig, seed: rig.actor.switch(("actor", "ref", "old")[seed % 3])] * 4,
    lambda rig, seed: rig.actor.switch("actor"),
    lambda rig, seed: load(rig, ("actor", "ref", "old")[seed % 3], seed),
    lambda rig, seed: rig.actor.tag(("ref", "old")[seed % 2], ("actor", "old", "ref")[seed % 3]),
    lambda rig, seed: rig.held(("actor", "ref", "old")[seed % 3]),
    lambda rig, seed: rig.actor.begin_training() or rig.step() or rig.actor.abort_training(),
]


def outcome(step: Step, rig: Rig, seed: int) -> object:
    """What the step gives, or the kind of its refusal. ``rig.expected`` is not kept up: the other rig is expected."""
    try:
        return step(rig, seed)
    except TransitionRefused as refusal:
        return type(refusal).__name__


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_end_where_arena_does(seed: int):
    """The same events on a backend without any of it, and on the late one: equal, bit for bit, after each."""
    chosen = random.Random(seed)
    plain = busy(ArenaBackend(POISON), protect_copies=True)
    rig = busy(LateArena(POISON, LATE, CHUNK), protect_copies=True)
    for count in range(40):
        step, number, look = chosen.choice(STEPS), chosen.randrange(100), chosen.random() < 0.5
        if count % 10 == 0:  # there is something to exchange where one is in training
            step = _train
        elif count % 10 == 1:
            step, number = STEPS[6], 1 + count % 2
        want, got = outcome(step, plain, number), outcome(step, rig, number)
        assert equal([got], [want])
        assert rig.actor.state.name == plain.actor.state.name
        assert rig.actor.state.tag == plain.actor.state.tag
        if look:  # which waits for what is on its way
            assert equal(contents(rig), contents(plain))
    assert any(record.direction == "both" for record in rig.actor.journal), "this walk has exchanged nothing"
    assert equal(contents(rig), contents(plain))
    for one in (plain, rig):
        one.actor.close()
    assert equal(contents(rig), contents(plain))


# stopped


@ERRORS
def test_stopped_at_every_chunk(error):
    """Rolled back to where it began, with both versions whole; the same switch succeeds next."""
    rig, number = dirty(), 0
    while True:
        with stopping(rig, "exchange", number, error) as stopped:
            if not _stops(rig, "ref", error):
                break
        assert stopped == ["exchange"]
        assert rig.state == "RESIDENT"
        assert rig.actor.source("ref") is not Copy.DEVICE
        rig.check()
        rig.train()  # dirty again
        number += 1
    assert number == -(-rig.actor._world.nbytes(Slot.TRAINED) // CHUNK) + 1
    rig.check()


def _stops(rig: Rig, tag: str, error: type[BaseException] = RuntimeError) -> bool:
    """Whether the switch was stopped."""
    try:
        rig.actor.switch(tag)
    except (EffectFailed, error):
        return True
    return False


@ERRORS
@pytest.mark.parametrize("number", [0, 1, 5, 9])
@pytest.mark.parametrize("again", [0, 2, 7, None])
def test_stopped_again_while_undoing(number, again, error):
    """Then it is a fault, and one part is half here and half there: recover() makes both versions whole."""
    rig = dirty()

    def at_chunk(what: str, at: int) -> None:
        if (what, at) in (("exchange", number), ("finish", last if again is None else again)):
            raise error(f"{what} stopped at chunk {at}")

    last = -(-rig.actor._world.nbytes(Slot.TRAINED) // CHUNK)
    arena(rig).at_chunk = at_chunk
    assert _stops(rig, "ref", error)

    assert rig.state == "FAULTED(exchange_weights)"
    assert rig.actor.facts.halves == {Slot.TRAINED: part_of(rig, "actor")}
    with pytest.raises((Faulted, error)):
        rig.actor.recover()  # which is stopped too
    arena(rig).at_chunk = lambda what, number: None
    rig.actor.recover()
    assert rig.state == "RESIDENT"
    assert not rig.actor.facts.halves
    rig.check()
    rig.actor.switch("ref")
    rig.check()


@pytest.mark.parametrize("number", [0, 3, 9])
def test_stopped_while_the_old_one_comes_back(number):
    """What was half moved is put together, and its return fails: recover() brings it from the whole copy."""
    rig = dirty()
    copy_in = arena(rig).copy_in

    def broken(*arguments: Any) -> int:
        copy_in(*arguments)
        raise RuntimeError("on the way back")

    arena(rig).copy_in = broken
    with stopping(rig, "exchange", number):
        assert _stops(rig, "ref")
    assert rig.state == "FAULTED(exchange_weights)"
    arena(rig).copy_in = copy_in
    rig.actor.recover()
    rig.check()


@pytest.mark.parametrize("number", [0, 3, 9])
def test_closed_half_moved(number):
    """close() from there puts together what the actor needs, and leaves it on the device."""
    rig = dirty()
    with stopping(rig, "finish", 4):
        arena_stop = arena(rig).at_chunk

        def at_chunk(what: str, at: int) -> None:
            arena_stop(what, at)
            if (what, at) == ("exchange", number):
                raise RuntimeError("stopped")

        arena(rig).at_chunk = at_chunk
        assert _stops(rig, "ref")
    assert rig.state == "FAULTED(exchange_weights)"
    rig.actor.close()
    assert equal(snapshot(rig.model), rig.expected["actor"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", ["exchange_weights", "restore_weights"])
def test_stopped_around_the_exchange(at, when):
    """Between its parts, and behind it: what is there is put back."""
    rig = dirty()

    def blow() -> None:
        raise RuntimeError("a bug")

    with striking(rig.actor, blow, at, when) as strike, pytest.raises(EffectFailed):
        rig.actor.switch("ref")
    assert strike.at == ("switch", at)
    assert rig.state == "RESIDENT"
    rig.check()


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_no_host_memory(error):
    """The buffer for what goes out is refused: nothing has been moved."""
    store = FlakyStore(make_store("pinned", "cpu"))
    rig = busy(LateArena(POISON, LATE, CHUNK), host=store)
    rig.actor.switch("ref")
    rig.actor.switch("actor")
    rig.train()
    moved = rig.actor.traffic.device_to_host, rig.actor.traffic.host_to_device
    asked: list[str] = []
    arena(rig).at_chunk = lambda what, number: asked.append(what)
    rig.actor._world.pool.shrink()
    store.full = error

    with pytest.raises(EffectFailed) as caught:
        rig.actor.switch("ref")

    assert isinstance(caught.value.__cause__, error)
    assert caught.value.rolled_back
    assert store.refused
    assert rig.state == "RESIDENT"
    assert not asked
    assert (rig.actor.traffic.device_to_host, rig.actor.traffic.host_to_device) == moved
    store.full = None
    rig.check()
    rig.actor.switch("ref")
    rig.check()


# what comes in is not what it should be


def test_a_spoiled_copy_comes_in():
    """Found when it is there: what went out comes back, whole, and the spoiled copy is not relied on."""
    rig = dirty()
    spoil(rig, "ref")
    with pytest.raises(VerificationFailed):
        rig.actor.switch("ref")
    assert rig.state == "RESIDENT"
    assert part_of(rig, "ref") in rig.actor.facts.doubted
    rig.check(but=("ref",))
    rig.train()
    rig.check(but=("ref",))


@pytest.mark.parametrize("end", ["recover", "close"])
def test_a_spoiled_copy_and_a_stop(end):
    """The undoing is stopped too: the actor's weights are in their copy, and come from there."""
    rig = dirty()
    spoil(rig, "ref")
    copy_in = arena(rig).copy_in

    def broken(*arguments: Any) -> int:
        raise RuntimeError("on the way back")

    arena(rig).copy_in = broken
    with pytest.raises((VerificationFailed, EffectFailed)):
        rig.actor.switch("ref")
    assert rig.state == "FAULTED(exchange_weights)"
    arena(rig).copy_in = copy_in
    getattr(rig.actor, end)()
    assert equal(snapshot(rig.model), rig.expected["actor"])
    if end == "recover":
        rig.check(but=("ref",))


@pytest.mark.parametrize("number", [0, 1, 6, 10])
def test_a_copy_made_again(number):
    """A copy that is doubted is made again by the next exchange: stopped half-way, it is not taken for the whole."""
    rig = dirty()
    rig.actor.switch("ref")
    arena(rig).flipping.add(arena(rig).started + VERSION_SLOTS.index(Slot.TRAINED))
    rig.actor.switch("actor")
    with pytest.raises(EffectFailed):
        rig.held("actor")
    rig.actor.recover()
    assert part_of(rig, "actor") in rig.actor.facts.doubted
    rig.check()
    spoil(rig, "actor")

    with stopping(rig, "exchange", number) as stopped:
        assert _stops(rig, "ref")

    assert stopped
    assert rig.state == "RESIDENT"
    assert part_of(rig, "actor") not in rig.actor.facts.doubted
    rig.check()
    rig.actor.switch("ref")
    rig.check()


def test_readers_of_what_goes_out():
    """A reader of the device's bytes is not overtaken; one of the copy that comes in keeps it."""
    rig = dirty()
    with rig.actor.weights("actor"), pytest.raises(TransitionRefused):
        rig.actor.switch("ref")
    with rig.actor.weights("ref") as weights:
        rig.actor.switch("ref")
        assert equal({name: t.clone() for name, t in weights.items()}, rig.expected["ref"])
    rig.check()
    assert isinstance(rig.model, Deep)


def test_close_that_fails_half_moved():
    """What goes out is another tag's than the actor's: it is made whole before the actor's comes over it."""
    rig = dirty()
    rig.actor.switch("ref")
    with torch.no_grad():
        rig.model.norm.weight.add_(1)
    rig.actor.adopt()
    rig.expected["ref"] = snapshot(rig.model)

    def blow() -> None:
        raise RuntimeError("a bug")

    def at_chunk(what: str, at: int) -> None:
        if at == 4:
            blow()

    arena(rig).at_chunk = at_chunk
    assert _stops(rig, "actor")
    assert rig.actor.facts.halves == {Slot.TRAINED: part_of(rig, "ref")}
    arena(rig).at_chunk = lambda what, number: None

    with striking(rig.actor, blow, "bring_back", "after"), pytest.raises(EffectFailed):
        rig.actor.close()
    assert rig.actor.state.name == "FAULTED"
    rig.actor.recover()
    rig.check()
