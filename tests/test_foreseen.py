"""What an event begins ahead of its effects: told to the backend once, given up by whatever ends the event early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from deep import Deep, busy, close_all
from rig import Rig, adam, make_rig, striking

from lifecycle import ActorLifecycle, EffectFailed, ManifestError, NoReadableCopy, VerificationFailed
from lifecycle.memory.arena import ArenaBackend
from lifecycle.memory.base import Incoming
from lifecycle.testing.late import LateArena
from states.actor import ACTOR
from states.extend import Insert, extended
from states.resources import Region, Slot
from states.spec import Effect


@pytest.fixture(autouse=True)
def _all_closed():
    yield
    close_all()


class Ahead(ArenaBackend):
    """Keeps a log of what is begun, resumed and cancelled; ``cancelling`` is called at each cancel."""

    def __init__(self) -> None:
        super().__init__(0xCB)
        self.log: list[str] = []
        self.cancelling: Callable[[], None] = lambda: None

    def begin_resume(self, region: Region) -> None:
        assert region not in self.resident()
        self.log.append(f"begin {region}")

    def cancel_resume(self) -> None:
        self.log.append("cancel")
        self.cancelling()

    def resume(self, region: Region) -> int:
        self.log.append(f"resume {region}")
        return super().resume(region)

    def check(self) -> None:
        self.log.append("check")
        super().check()


def asleep(**settings: object) -> tuple[Rig, Ahead]:
    memory = Ahead()
    rig = make_rig(memory=memory, **settings)
    rig.train()
    rig.actor.sleep()
    memory.log.clear()
    return rig, memory


def test_a_wake_begins_with_its_memory():
    """Its weights first, each region before the structure is compared; what is cancelled at the end is nothing."""
    rig, memory = asleep()

    rig.actor.wake_up()

    begun = [line for line in memory.log if line.startswith("begin")]
    assert begun == [f"begin {region}" for region in (Region.WEIGHTS, Region.REST, Region.OPTIMIZER)]
    assert memory.log[: len(begun)] == begun
    assert memory.log[len(begun)] == "check"
    resumed = [line for line in memory.log if line.startswith("resume")]
    assert memory.log[memory.log.index("cancel") :] == ["cancel"]
    assert memory.log.index("cancel") > max(map(memory.log.index, resumed))
    rig.check()


def test_what_takes_nothing_back_begins_nothing():
    """Nor does a plan, or an event that is refused by its guards."""
    rig, memory = asleep()

    rig.actor.plan("wake_up")
    with pytest.raises(Exception, match="switch"):
        rig.actor.switch("ref")
    rig.actor.sleep()
    assert memory.log == []


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_refused_wake_gives_up_what_it_began(spoiled):
    """Also where that fails: the caller hears why the wake was refused, and the journal of the rest."""
    rig, memory = asleep()
    weight = rig.model.body.weight
    was, weight.data = weight.data, torch.zeros_like(weight)
    if spoiled:
        memory.begin_resume = lambda region: (_ for _ in ()).throw(OSError("can not be begun"))
        memory.cancelling = lambda: (_ for _ in ()).throw(OSError("can not be given back"))

    with pytest.raises(ManifestError, match=r"body\.weight"):
        rig.actor.wake_up()

    assert "cancel" in memory.log
    assert not any(line.startswith("resume") for line in memory.log)
    assert rig.state == "ASLEEP"
    told = [record.note for record in rig.actor.journal if "can not be given back" in record.note]
    assert bool(told) == spoiled
    weight.data = was
    memory.cancelling = lambda: None
    rig.actor.wake_up()
    rig.check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("effect", ["check_structure", "resume_actor_regions", "restore_weights"])
def test_whatever_stops_an_effect_gives_it_up(effect, error):
    """Before the memory's own effect and behind it."""
    rig, memory = asleep()

    def blow() -> None:
        raise error("struck")

    with pytest.raises(BaseException, match="struck") as caught, striking(rig.actor, blow, effect) as strike:
        rig.actor.wake_up()

    assert strike.at == ("wake_up", effect)
    assert caught.value is not None
    assert "cancel" in memory.log
    assert rig.state == "ASLEEP"
    rig.actor.wake_up()
    rig.check()


def test_a_wake_without_a_copy_gives_it_up():
    """The plan finds that the tag has none, after the memory was begun with."""
    rig, memory = asleep()
    facts, executor = rig.actor.facts, rig.actor._executor

    executor.facts = evolve(facts, copies={})
    with pytest.raises(NoReadableCopy):
        rig.actor.wake_up()

    assert memory.log[-1] == "cancel"
    assert rig.state == "ASLEEP"
    executor.facts = facts
    rig.actor.wake_up()
    rig.check()


class Told(LateArena):
    """Keeps what it was told would come first, and what came first."""

    def __init__(self) -> None:
        super().__init__(0xCB)
        self.told: list[frozenset[Any]] = []
        self.started_with: list[frozenset[Any]] = []

    def begin_copy_in(self, block: Sequence[Incoming]) -> None:
        assert Region.WEIGHTS not in self.resident()
        self.told.append(asked(block))

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[Any, ...]:
        if len(blocks) > 1:
            self.started_with.append(asked(blocks[0]))
        return super().start_copy_in(blocks, aside)


def asked(block: Sequence[Incoming]) -> frozenset[tuple[Slot, int, int, frozenset[str] | None]]:
    return frozenset((one.slot, id(one.buffer), one.nbytes, one.names) for one in block)


@pytest.mark.parametrize("tag", ["actor", "ref", "old"])
def test_a_streamed_wake_tells_its_first_block_ahead(tag):
    """Of all kinds of weights, from the buffers of its own tag, before there is memory for it."""
    rig = busy(memory := Told())
    rig.actor.sleep()

    rig.actor.wake_up(tag, stream=True)

    assert memory.told == memory.started_with
    (block,) = memory.told
    assert {slot for slot, *_ in block} == {Slot.TRAINED, Slot.FROZEN, Slot.STATE}
    names = frozenset().union(*(names for *_, names in block))
    assert "embed.weight" in names
    assert "layers.0.inner.weight" in names
    assert "layers.1.inner.weight" not in names
    rig.check()


def test_a_wake_that_is_not_streamed_tells_none():
    """Nor does an event that brings back no weights."""
    rig = busy(memory := Told())
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.actor.switch("ref")
    rig.actor.wake_up("ref", stream=True)

    assert memory.told == []


def test_what_can_not_be_cancelled_at_the_end_is_no_failure():
    """The event has done all that was asked; the journal says what is left over."""
    rig, memory = asleep()

    def blow() -> None:
        raise OSError("can not be given back")

    memory.cancelling = blow
    rig.actor.wake_up()
    rig.actor.switch("ref")

    assert rig.state == "SWITCHED(ref)"
    assert rig.actor.journal[-1].kind == "commit"
    assert any("can not be given back" in record.note for record in rig.actor.journal)
    rig.check()


class Hollow(Deep):
    """Has a buffer without a byte, so that a whole slot has none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def test_a_slot_without_bytes_is_not_told():
    """It has no copy to come from, and the others are told all the same."""
    memory, model = Told(), Hollow()
    with ActorLifecycle(model, adam(model), ("ref",), memory, "pinned") as actor:
        actor.sleep()
        actor.wake_up(stream=True)

    assert memory.told == memory.started_with
    assert {slot for slot, *_ in memory.told[0]} == {Slot.TRAINED, Slot.FROZEN}


@pytest.mark.parametrize("trouble", ["flipping", "failing"])
@pytest.mark.parametrize("harmless", [True, False])
def test_an_effect_of_others_own_finds_the_first_block_there_and_right(harmless, trouble):
    """Behind weights that are streamed: it does not run where the block is wrong, and the wake is undone."""
    own = Effect("announce", "Tell others that the weights are there.", harmless=harmless)
    insert = Insert("announce", "wake_up", after="restore_weights", target="RESIDENT")
    machine = extended(ACTOR, "announcing", effects=[own], insert=[insert])
    model, memory, ran = Deep(), Told(), []
    want = model.embed.weight.detach().clone()

    def announce(call: object) -> None:
        ran.append(torch.equal(model.embed.weight, want))

    with ActorLifecycle(
        model, adam(model), ("ref",), memory, "pinned", machine=machine, perform={"announce": announce}
    ) as actor:
        actor.sleep()
        getattr(memory, trouble).add(memory.started)
        with pytest.raises((VerificationFailed, EffectFailed)):
            actor.wake_up(stream=True)
        assert (str(actor.state), ran) == ("ASLEEP", [])
        assert (actor.journal[-1].kind, actor.journal[-1].effect) == ("unwind", "restore_weights")
        actor.wake_up(stream=True)
        assert ran == [True]


@pytest.mark.parametrize(("after", "told"), [("resume_actor_regions", 0), ("restore_weights", 1)])
def test_an_effect_of_others_own_comes_before_what_is_behind_it(after, told):
    """It may write where the weights are to come: nothing is copied there ahead of it."""
    stamp = Effect("stamp", "Something of this trainer's own.")
    machine = extended(
        ACTOR, "stamping", effects=[stamp], insert=[Insert("stamp", "wake_up", after=after, target="RESIDENT")]
    )
    model, memory = Deep(), Told()
    with ActorLifecycle(
        model, adam(model), ("ref",), memory, "pinned", machine=machine, perform={"stamp": lambda call: None}
    ) as actor:
        actor.sleep()
        actor.wake_up(stream=True)
        assert len(memory.told) == told
        assert len(memory.started_with) == 1
