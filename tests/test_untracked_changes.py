"""Weights changed or loaded behind the controller's back are noticed before anything is destroyed or published."""

from __future__ import annotations

import pytest
import torch
from rig import Net, equal, snapshot

from lifecycle import UntrackedChange
from lifecycle.testing.engines import FakeEngine


def _data(model):
    model.body.weight.data.add_(1)


def _in_place(model):
    with torch.no_grad():
        model.body.weight[0, 0] = 7


def _flat_view(model):
    model.body.weight.detach().view(-1)[3:5].zero_()


def _buffer(model):
    model.bias.mul_(2)


def _frozen(model):
    model.frozen.bias.data[1] += 1


def _checkpoint(model):
    model.load_state_dict(Net(seed=5).state_dict())


def _tied_name(model):
    model.head.weight.data[2] = 0


CHANGES = {
    _data: ["body.weight"],
    _in_place: ["body.weight"],
    _flat_view: ["body.weight"],
    _buffer: ["bias"],
    _frozen: ["frozen.bias"],
    _tied_name: ["embed.weight", "head.weight"],
    _checkpoint: None,
}
EVENTS = {
    "sleep": lambda actor: actor.sleep(),
    "switch": lambda actor: actor.switch("ref"),
    "begin_training": lambda actor: actor.begin_training(),
    "load": lambda actor: actor.loading("ref").__enter__(),
    "sync": lambda actor: actor.sync(FakeEngine(transports=("in_process",))),
    "using": lambda actor: actor.using("ref").__enter__(),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_change_is_refused(rig, change, event):
    """Before the change is destroyed or published, it is refused by name; putting the bytes back is a way out."""
    change(rig.model)
    changed = snapshot(rig.model)
    version = rig.actor.version("actor")

    with pytest.raises(UntrackedChange) as error:
        EVENTS[event](rig.actor)

    assert (error.value.tag, error.value.version) == ("actor", version.id)
    if CHANGES[change] is not None:
        assert list(error.value.names) == CHANGES[change]
    assert rig.state == "RESIDENT"
    assert equal(snapshot(rig.model), changed)
    rig.check(but=("actor", "old_actor"))  # which reads on the device what it has in common with the actor
    with torch.no_grad():
        for name, tensor in [*rig.model.named_parameters(), *rig.model.named_buffers()]:
            if name != "table":
                tensor.copy_(rig.expected["actor"][name])
    rig.actor.sleep()
    rig.check()


def test_change_is_adopted_on_request(rig):
    """adopt() makes what is there the actor's new version; other tags that have a copy keep what they had."""
    before = rig.actor.version("actor")
    _checkpoint(rig.model)
    rig.expected["actor"] = snapshot(rig.model)

    rig.actor.adopt()

    assert rig.actor.version("actor").id != before.id
    assert rig.actor.version("actor").step == before.step
    rig.check()
    rig.actor.sleep()
    rig.check()
    rig.actor.wake_up()
    rig.check()


@pytest.mark.parametrize("event", [name for name in EVENTS if name != "load"])
def test_change_is_adopted_by_setting(make, event):
    """With on_untracked='adopt' the event takes the change for a new version of the shown tag, and goes on."""
    rig = make(on_untracked="adopt")
    rig.load("ref", seed=1)
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.actor.tag("old_actor", "actor")
    _data(rig.model)
    rig.expected["actor"] = snapshot(rig.model)

    EVENTS[event](rig.actor)

    if event == "begin_training":
        rig.actor.end_training()
    rig.check()


@pytest.mark.parametrize("on_untracked", ["refuse", "adopt"])
def test_change_while_switched(make, on_untracked):
    """A change of another tag's bytes on the device is that tag's, never the actor's."""
    rig = make(on_untracked=on_untracked)
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.switch("ref")
    _data(rig.model)
    changed = snapshot(rig.model)

    if on_untracked == "refuse":
        with pytest.raises(UntrackedChange) as error:
            rig.actor.switch("actor")
        assert error.value.tag == "ref"
        assert rig.state == "SWITCHED(ref)"
        rig.actor.adopt()
    rig.actor.switch("actor")
    rig.expected["ref"] = changed

    rig.check()


@pytest.mark.parametrize("on_untracked", ["refuse", "adopt"])
def test_change_that_takes_other_tags_last_copy(make, on_untracked):
    """When the changed bytes were the only copy that other tags had, nothing is adopted for the actor in silence."""
    rig = make(on_untracked=on_untracked)
    _data(rig.model)

    with pytest.raises(UntrackedChange) as error:
        rig.actor.sleep()

    assert error.value.tag == "actor"
    if on_untracked == "adopt":
        assert "ref, old_actor without any copy" in str(error.value)
    assert rig.state == "RESIDENT"

    rig.actor.adopt()
    rig.expected = dict.fromkeys(rig.expected, snapshot(rig.model))
    assert len(set(rig.actor.tags.values())) == 1
    rig.actor.sleep()
    rig.check()


def test_reloading_is_the_other_way_out(make):
    """A tag whose last copy was changed away gets its weights again by loading()."""
    rig = make(on_untracked="adopt")
    original = snapshot(rig.model)
    _data(rig.model)
    with pytest.raises(UntrackedChange):
        rig.actor.sleep()
    rig.actor.adopt()
    rig.expected = dict.fromkeys(rig.expected, snapshot(rig.model))

    with rig.actor.loading("ref"):
        rig.model.load_state_dict({**rig.model.state_dict(), **original})
    rig.expected["ref"] = original
    rig.actor.tag("old_actor", "ref")
    rig.expected["old_actor"] = original

    rig.check()
    rig.actor.sleep()
    rig.check()


def test_change_before_an_implicit_step(rig):
    """A step outside a phase would bury the change in its result: it is refused before it writes a byte."""
    rig.optimizer.zero_grad()
    rig.backward()
    _data(rig.model)
    changed = snapshot(rig.model)

    with pytest.raises(UntrackedChange):
        rig.optimizer.step()

    assert equal(snapshot(rig.model), changed)
    rig.actor.adopt()
    rig.optimizer.step()
    assert not equal(snapshot(rig.model), changed)
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()


def test_change_of_released_memory(rig):
    """What is written while the actor sleeps is worth nothing: waking brings back the version."""
    rig.actor.sleep()
    _data(rig.model)
    rig.model.body.weight.data.fill_(3)

    rig.actor.wake_up()

    rig.check()


def test_assigning_the_same_bytes_is_no_change(rig):
    """The structure is compared by what tensors are over: the same bytes assigned to themselves are the same."""
    rig.model.body.weight.data = rig.model.body.weight.data

    rig.actor.sleep()

    rig.check()


@pytest.mark.parametrize(("verify", "noticed"), [("sample", True), ("never", False)])
def test_less_verification(make, verify, noticed):
    """A sample finds a change at the eighth sleep at the latest; with 'never' a change is dropped without a word."""
    rig = make(verify=verify)
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.sleep()
    names = set()

    for _ in range(8):
        rig.actor.wake_up()
        rig.check()
        _data(rig.model)
        try:
            rig.actor.sleep()
        except UntrackedChange as error:
            names |= set(error.names)
            rig.model.load_state_dict({**rig.model.state_dict(), **rig.expected["actor"]})
            rig.actor.sleep()

    assert names == ({"body.weight"} if noticed else set())
    rig.check()
