"""Weights that leave are read for their fingerprint beside the copy, and a copy of something else is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest
import torch
from attrs import evolve
from rig import Rig, adam, equal, make_rig, snapshot
from torch import nn

from lifecycle import ActorLifecycle, LifecycleConfig, UntrackedChange
from lifecycle.adapters.plain import PlainAdapter
from lifecycle.hoststore.base import HostBuffer
from lifecycle.testing.late import LateArena
from states.actor import ACTOR
from states.extend import Insert, extended
from states.resources import Slot
from states.spec import SAME, Effect, Event, Row

INSPECTING = evolve(
    ACTOR,
    name="inspecting",
    events=(*ACTOR.events, Event("inspect", "Compare the weights with their version.")),
    rows=(*ACTOR.rows, Row("inspect", "RESIDENT", SAME, ("check_structure", "verify_weights"))),
    refused=tuple((state, (*events, "inspect") if state != "RESIDENT" else events) for state, events in ACTOR.refused),
)


class Beside(LateArena):
    """Keeps a log of what is read and copied; ``spoil`` is called when a copy has been made."""

    def __init__(self) -> None:
        super().__init__(0xCB)
        self.log: list[str] = []
        self.spoil: Callable[[], None] = lambda: None

    def start_fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> Callable[[], Mapping[str, str]]:
        self.log.append(f"start {slot}")
        read = super().start_fingerprints(slot, names)

        def told() -> Mapping[str, str]:
            self.log.append(f"read {slot}")
            return read()

        return told

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        self.log.append(f"copy {slot}")
        moved = super().copy_out(slot, buffer)
        self.spoil()
        return moved


def make(**settings: object) -> tuple[Rig, Beside]:
    memory = Beside()
    rig = make_rig(memory=memory, **settings)
    rig.load("ref", seed=1)
    rig.train()
    memory.log.clear()
    return rig, memory


def change(model: nn.Module) -> None:
    getattr(model, "body", model).weight.data.add_(1)


def test_what_is_copied_is_read_beside_the_copy():
    """Started before it and heard of behind it; what has a copy is read by itself."""
    rig, memory = make()

    rig.actor.sleep()

    started, copied, told = (memory.log.index(f"{what} {Slot.TRAINED}") for what in ("start", "copy", "read"))
    assert started < copied < told
    assert memory.log.count(f"start {Slot.TRAINED}") == memory.log.count(f"read {Slot.TRAINED}") == 1
    rig.actor.wake_up()
    rig.check()
    memory.log.clear()
    rig.actor.sleep()
    assert f"copy {Slot.TRAINED}" not in memory.log
    assert memory.log.count(f"start {Slot.TRAINED}") == memory.log.count(f"read {Slot.TRAINED}") == 1
    rig.check()


def test_a_copy_of_something_else_is_given_back():
    """The event is refused, nothing is released, no tag has a copy more, and the host has its memory back."""
    rig, memory = make()
    world, facts = rig.actor._world, rig.actor.facts
    change(rig.model)
    changed, buffers = snapshot(rig.model), dict(world.buffers)

    with pytest.raises(UntrackedChange) as error:
        rig.actor.sleep()

    assert list(error.value.names) == ["body.weight"]
    assert f"copy {Slot.TRAINED}" in memory.log
    assert rig.state == "RESIDENT"
    assert equal(snapshot(rig.model), changed)
    assert world.buffers == buffers
    assert rig.actor.facts.copies == facts.copies
    rig.actor.adopt()
    rig.expected["actor"] = changed
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.check(but=("old_actor",))


def test_a_failed_copy_leaves_nothing_to_be_heard_of():
    """What was started for an event that failed is not held against the next one."""
    rig, memory = make()
    memory.spoil = lambda: (_ for _ in ()).throw(OSError("no room"))
    with pytest.raises(Exception, match="no room"):
        rig.actor.sleep()
    memory.spoil = lambda: None
    assert rig.state == "RESIDENT"
    memory.log.clear()

    rig.train()
    rig.actor.sleep()

    assert memory.log.count(f"read {Slot.TRAINED}") == memory.log.count(f"start {Slot.TRAINED}")
    rig.actor.wake_up()
    rig.check()


def test_changes_to_adopt_are_known_before_anything_is_copied():
    """With on_untracked='adopt' the copy that is made is that of the new version."""
    rig, memory = make(on_untracked="adopt")
    rig.actor.tag("old_actor", "actor")
    rig.expected["old_actor"] = rig.expected["actor"]
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.train()
    change(rig.model)
    rig.expected["actor"] = snapshot(rig.model)
    memory.log.clear()

    rig.actor.sleep()

    assert memory.log.index(f"read {Slot.TRAINED}") < memory.log.index(f"copy {Slot.TRAINED}")
    rig.actor.wake_up()
    rig.check()


@pytest.mark.parametrize("changed", [False, True])
def test_a_machine_that_verifies_and_copies_nothing_hears_of_it(changed):
    """At the end of the row at the latest."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory = Beside()
    with ActorLifecycle(model, adam(model), (), memory, "pinned", LifecycleConfig(), machine=INSPECTING) as actor:
        if changed:
            with torch.no_grad():
                model[0].weight.add_(1)
            with pytest.raises(UntrackedChange):
                actor.fire("inspect")
            actor.adopt()
        actor.fire("inspect")

        assert "copy" not in str(memory.log)
        assert memory.log.count(f"start {Slot.TRAINED}") == memory.log.count(f"read {Slot.TRAINED}") > 0


def settling(machine=ACTOR, **options: object) -> tuple[Rig, Writing]:
    """A rig whose trained weights have no copy, and an adapter that waits for a late writer of theirs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = adam(model)
    adapter = Writing(model, optimizer)
    actor = ActorLifecycle(model, optimizer, ("ref",), Beside(), "pinned", adapter=adapter, machine=machine, **options)
    with actor.loading("ref"), torch.no_grad():
        model[1].weight.add_(1)
    with actor.training():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return Rig(actor, model, optimizer), adapter


class Writing(PlainAdapter):
    """``write`` is what somebody else still does to the weights when the actor waits for writers."""

    write: Callable[[], object] = staticmethod(lambda: None)

    def settle(self) -> None:
        self.write()


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_writer_leaves_is_read(copied):
    """A look is begun when writers have been waited for, whether or not the weights have a copy."""
    rig, adapter = settling()
    if copied:
        rig.actor.sleep()
        rig.actor.wake_up()
        with rig.actor.weights():
            pass
    adapter.write = lambda: change(rig.model[0])

    with pytest.raises(UntrackedChange) as error:
        rig.actor.sleep()

    assert list(error.value.names) == ["0.weight"]
    assert rig.state == "RESIDENT"


def test_what_a_writer_puts_back_is_no_change():
    """Bytes that were elsewhere until it was waited for."""
    rig, adapter = settling()
    weight = rig.model[0].weight
    was = weight.detach().clone()
    weight.data.zero_()
    adapter.write = lambda: weight.data.copy_(was)

    rig.actor.sleep()

    rig.actor.wake_up()
    with rig.actor.weights() as weights:
        assert torch.equal(weights["0.weight"], was)


def test_what_an_effect_of_ones_own_writes_is_read():
    """It may change the weights ahead of their verification, though it says that it changes nothing of ours."""
    machine = extended(
        ACTOR,
        "own",
        effects=[Effect("meet", "Every rank is there.", harmless=True)],
        insert=[Insert("meet", "switch", before="verify_weights")],
    )
    model: list[nn.Module] = []
    rig, _ = settling(machine, perform={"meet": lambda call: change(model[0]) if model else None})
    model.append(rig.model[0])

    with pytest.raises(UntrackedChange):
        rig.actor.switch("ref")

    assert rig.state == "RESIDENT"


def test_a_change_is_told_before_that_there_is_no_room(monkeypatch):
    """Of two reasons the one that says what to do."""
    rig, _ = make()
    change(rig.model)
    monkeypatch.setattr(rig.actor._world.pool, "acquire", lambda nbytes: (_ for _ in ()).throw(MemoryError("full")))

    with pytest.raises(UntrackedChange):
        rig.actor.sleep()

    assert rig.state == "RESIDENT"
