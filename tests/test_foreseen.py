"""What an event begins ahead of its effects: told to the backend once, given up by whatever ends the event early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from rig import Rig, make_rig, striking

from lifecycle import ManifestError, NoReadableCopy
from lifecycle.memory.arena import ArenaBackend
from states.resources import Region


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
    """The largest region first, each before the structure is compared; nothing is cancelled."""
    rig, memory = asleep()

    rig.actor.wake_up()

    begun = [line for line in memory.log if line.startswith("begin")]
    assert set(begun) == {f"begin {region}" for region in (Region.WEIGHTS, Region.REST, Region.OPTIMIZER)}
    assert memory.log[: len(begun)] == begun
    assert memory.log[len(begun)] == "check"
    assert "cancel" not in memory.log
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
