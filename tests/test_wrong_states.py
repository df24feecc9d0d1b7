"""What a state does not allow: refused by name, with what is allowed instead, and not a byte changes."""

from __future__ import annotations

import pytest
import torch
from rig import TOKENS, Net, adam, equal, moments, snapshot

from lifecycle import TransitionRefused


def _untouched(rig, state="RESIDENT"):
    assert rig.state == state
    assert rig.actor.moving is None
    rig.check()


def _training(rig):
    rig.actor.begin_training()


def _backward(rig):
    rig.backward()


def _step(rig):
    for parameter in rig.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    rig.optimizer.step()


@pytest.mark.parametrize("state", ["SWITCHED(ref)", "ASLEEP"])
@pytest.mark.parametrize(("event", "act"), [("begin_training", _training), ("backward", _backward), ("step", _step)])
def test_training_where_the_actor_is_not(rig, state, event, act):
    """No phase, no gradient and no step on other weights than the actor's: not a byte of anything changes."""
    rig.actor.sleep()
    rig.actor.wake_up()
    before = moments(rig.optimizer)
    rig.actor.switch("ref") if state == "SWITCHED(ref)" else rig.actor.sleep()

    with pytest.raises(TransitionRefused) as error:
        act(rig)

    forward = event == "backward" and state == "ASLEEP"  # it is the forward that already is refused
    assert (error.value.event, error.value.state) == ("forward" if forward else event, state)
    assert error.value.allowed
    assert error.value.advice
    if event != "step":
        assert all(p.grad is None for p in rig.model.parameters())
    _untouched(rig, state)
    if state == "ASLEEP":
        rig.actor.wake_up()
    rig.actor.switch("actor")
    assert equal(moments(rig.optimizer), before)
    _untouched(rig)


@pytest.mark.parametrize("leave", [lambda actor: actor.switch("ref"), lambda actor: actor.sleep()])
def test_backward_of_a_graph_from_before(rig, leave):
    """A forward of the actor does not make its backward allowed once other weights, or none, are on the device."""
    rig.optimizer.zero_grad()
    loss = rig.model(TOKENS).sum()
    leave(rig.actor)

    with pytest.raises(TransitionRefused) as error:
        loss.backward()

    assert error.value.event == "backward"
    assert all(p.grad is None for p in rig.model.parameters())
    _untouched(rig, rig.state)


def test_switching_while_asleep(rig):
    """Waking goes straight to a tag: a switch of nothing is refused with that advice."""
    rig.actor.sleep()

    with pytest.raises(TransitionRefused) as error:
        rig.actor.switch("ref")

    assert (error.value.state, error.value.advice) == ("ASLEEP", "wake_up(tag) goes straight there.")
    assert "wake_up" in error.value.allowed
    _untouched(rig, "ASLEEP")


@pytest.mark.parametrize("tag", ["ref", "old_actor"])
def test_waking_an_awake_actor_for_another_tag(rig, tag):
    """wake_up is no switch; for the tag that is shown it does nothing."""
    rig.actor.wake_up()

    with pytest.raises(TransitionRefused, match="switch") as error:
        rig.actor.wake_up(tag)

    assert error.value.event == f"wake_up({tag})"
    _untouched(rig)


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (lambda actor: actor.training(), "a training phase is open"),
        (lambda actor: actor.loading("ref"), "a load is open"),
        (lambda actor: actor.using("ref"), "a using() or hold() scope is open"),
        (lambda actor: actor.hold(), "a using() or hold() scope is open"),
        (lambda actor: actor.weights("actor"), "weights() is reading the device"),
    ],
    ids=["training", "loading", "using", "hold", "weights"],
)
def test_sleeping_inside(rig, scope, reason):
    """Sleep is refused inside any block, whose end then works as if nothing had been asked."""
    with scope(rig.actor):
        inside = rig.state
        if "load" in reason:
            rig.expected["ref"] = rig.expected["actor"]  # nothing else is written
        with pytest.raises(TransitionRefused) as error:
            rig.actor.sleep()
        assert rig.state == inside

    assert (error.value.event, error.value.reason) == ("sleep", reason)
    _untouched(rig)
    rig.actor.sleep()
    _untouched(rig, "ASLEEP")


@pytest.mark.parametrize(
    "way_out",
    [
        lambda rig: rig.actor.discard_grads(),
        lambda rig: rig.optimizer.zero_grad(),
        lambda rig: rig.optimizer.step(),
        lambda rig: rig.train(),
    ],
    ids=["discard_grads", "zero_grad", "step", "a phase"],
)
def test_backward_left_over(rig, way_out):
    """Gradients outside a phase are not lost by a sleep without a word; there are four ways out."""
    rig.backward()
    grads = [p.grad.clone() for p in rig.model.parameters() if p.requires_grad]
    with pytest.raises(TransitionRefused, match="gradients of a backward outside any phase") as error:
        rig.actor.sleep()
    assert equal(grads, [p.grad for p in rig.model.parameters() if p.requires_grad])
    assert "discard_grads() or zero_grad()" in error.value.advice

    way_out(rig)
    rig.expected["actor"] = snapshot(rig.model)
    rig.actor.sleep()

    _untouched(rig, "ASLEEP")


@pytest.mark.parametrize("state", ["RESIDENT", "SWITCHED(ref)", "ASLEEP"])
def test_state_dicts(rig, state):
    """Saving and loading through plain PyTorch works where the bytes are the actor's, and is refused elsewhere."""
    saved, optimizer = snapshot(rig.model), rig.optimizer.state_dict()
    {"RESIDENT": lambda: None, "SWITCHED(ref)": lambda: rig.actor.switch("ref"), "ASLEEP": rig.actor.sleep}[state]()
    asked = {
        "state_dict": lambda: equal({k: v for k, v in rig.model.state_dict().items() if k in saved}, saved),
        "load_state_dict": lambda: bool(rig.model.load_state_dict(saved)),
        "optimizer_state_dict": lambda: rig.optimizer.state_dict()["state"].keys() == optimizer["state"].keys(),
        "load_optimizer_state_dict": lambda: rig.optimizer.load_state_dict(optimizer) is None,
    }
    fine = {"RESIDENT": set(asked), "SWITCHED(ref)": {"optimizer_state_dict"}, "ASLEEP": set()}[state]

    for operation, ask in asked.items():
        if operation in fine:
            assert ask()
        else:
            with pytest.raises(TransitionRefused) as error:
                ask()
            assert (error.value.event, error.value.state) == (operation, state)
            assert error.value.advice
    _untouched(rig, state)


def test_state_dict_of_parts(rig):
    """A submodule's state dict is refused like the whole model's; weights() reads what it would have read."""
    rig.actor.switch("ref")

    with pytest.raises(TransitionRefused):
        rig.model.body.state_dict()
    with rig.actor.weights("actor") as weights:
        assert equal(weights["body.weight"], rig.expected["actor"]["body.weight"])


def test_optimizer_state_that_stayed_away(rig):
    """After waking for another tag the optimizer's state is not there to be saved."""
    rig.actor.sleep()
    rig.actor.wake_up("ref")

    with pytest.raises(TransitionRefused) as error:
        rig.optimizer.state_dict()

    assert error.value.event == "optimizer_state_dict"
    _untouched(rig, "SWITCHED(ref)")


def test_other_models_are_none_of_our_business(rig):
    """While the actor sleeps, another model's forward, backward and step go on as ever."""
    other = Net(seed=3)
    optimizer = adam(other)
    before = snapshot(other)
    rig.actor.sleep()

    other(TOKENS).sum().backward()
    optimizer.step()

    assert not equal(snapshot(other), before)
    _untouched(rig, "ASLEEP")
