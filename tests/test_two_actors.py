"""Two actors of one architecture in one process never touch each other's bytes, moments, tags or states."""

from __future__ import annotations

import pytest
import torch
from rig import TOKENS, Net, Rig, adam, equal, make_busy, make_rig, moments, snapshot, striking

from lifecycle import ActorLifecycle, EffectFailed, ManifestError, TransitionRefused
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.engines import FakeEngine


@pytest.fixture
def pair(few_objects) -> tuple[Rig, Rig]:
    """Actor and critic: equal at first, trained apart."""
    actor, critic = make_rig(protect_copies=True), make_rig(protect_copies=True)
    make_busy(actor)
    critic.load("ref", seed=5)
    critic.train(3)
    return actor, critic


def _everything(rig):
    """All that another actor's events must leave alone."""
    grads = [None if p.grad is None else p.grad.clone() for p in rig.model.parameters()]
    own = snapshot(rig.model) if rig.state != "ASLEEP" else None
    optimizer = moments(rig.optimizer) if rig.state == "RESIDENT" else None
    return [own, optimizer, {"facts": rig.actor.facts, "state": rig.state}, {"grads": _listed(grads)}]


def _listed(grads):
    return [{"grad": "none"} if grad is None else {"grad": grad} for grad in grads]


def _same(left, right):
    return all((a is None and b is None) or equal(a, b) for a, b in zip(left, right, strict=True))


STATES = {
    "RESIDENT": lambda rig: None,
    "a phase is open": lambda rig: (rig.actor.begin_training(), rig.step()),
    "a load is open": lambda rig: rig.actor._fire("load", tag="ref"),
    "a backward is left": lambda rig: rig.backward(),
    "SWITCHED": lambda rig: rig.actor.switch("ref"),
    "ASLEEP": lambda rig: rig.actor.sleep(),
}


@pytest.mark.parametrize("state", STATES)
def test_events_of_the_other(pair, state):
    """Whatever one actor does, in whatever state the other is: not a byte, not a fact of the other changes."""
    actor, critic = pair
    STATES[state](critic)
    before = _everything(critic)

    actor.actor.sleep()
    assert _same(_everything(critic), before)
    actor.actor.wake_up("ref")
    actor.actor.switch("actor")
    actor.train(2)
    actor.step()
    actor.expected["actor"] = snapshot(actor.model)
    actor.load("old_actor", seed=7)
    actor.actor.tag("ref", "actor")
    actor.expected["ref"] = actor.expected["actor"]
    actor.actor.sync(FakeEngine(transports=("in_process",)))
    actor.check()
    assert _same(_everything(critic), before)
    actor.actor.close()

    assert _same(_everything(critic), before)
    if state == "a phase is open":
        critic.actor.abort_training()
        return
    if state == "a load is open":
        critic.actor._fire("abort_load")
    critic.check()


def test_interleaved(pair):
    """A colocated step of both, interleaved: each sleeps while the other trains, and each trains as it would alone."""
    actor, critic = pair
    alone = make_rig()
    alone.load("ref", seed=5)
    alone.train(3)

    for _ in range(3):
        critic.actor.sleep()
        with actor.actor.training():
            actor.step()
            critic.actor.wake_up("ref")
            actor.step()
            critic.actor.switch("actor")
        actor.expected["actor"] = snapshot(actor.model)
        with critic.actor.training():
            critic.step()
            actor.actor.sleep()
            critic.step()
        critic.expected["actor"] = snapshot(critic.model)
        actor.actor.wake_up()
        actor.check()
        critic.check()
        alone.train(2)

    assert equal(snapshot(critic.model), snapshot(alone.model))
    assert equal(moments(critic.optimizer), moments(alone.optimizer))


def test_phases_of_both_at_once(pair):
    """Two open phases, one optimizer step inside each; one is aborted, the other ends."""
    actor, critic = pair
    actor.actor.sleep()
    actor.actor.wake_up()
    with critic.actor.training():
        actor.actor.begin_training()
        actor.step()
        critic.step()
        actor.actor.abort_training()
        critic.step()
    critic.expected["actor"] = snapshot(critic.model)

    actor.check()
    critic.check()


def test_loss_over_both(pair):
    """One backward through both models belongs to both; one of them asleep, it is refused before a gradient is made."""
    actor, critic = pair
    for rig in pair:
        rig.optimizer.zero_grad()
        rig.actor.begin_training()
    (actor.model(TOKENS).square().mean() + critic.model(TOKENS).square().mean()).backward()
    for rig in pair:
        rig.optimizer.step()
        rig.actor.end_training()
        rig.expected["actor"] = snapshot(rig.model)
        rig.check()

    loss = actor.model(TOKENS).square().mean() + critic.model(TOKENS).square().mean()
    critic.actor.sleep()
    with pytest.raises(TransitionRefused) as error:
        loss.backward()
    assert (error.value.event, error.value.state) == ("backward", "ASLEEP")
    assert all(p.grad is None for p in critic.model.parameters())
    critic.check()


def test_the_others_optimizer(pair):
    """An optimizer over the other actor's parameters is refused before it writes, whichever of the two is asleep."""
    _, critic = pair
    stray = torch.optim.SGD([critic.model.body.weight, torch.nn.Parameter(torch.ones(1))], lr=1.0)
    critic.model.body.weight.grad = torch.ones_like(critic.model.body.weight)
    for sleeper in pair:
        sleeper.actor.sleep()
        with pytest.raises(ManifestError, match=r"body\.weight"):
            stray.step()
        sleeper.check()
        sleeper.actor.wake_up()
    assert (stray.param_groups[0]["params"][1] == 1).all()
    critic.model.body.weight.grad = None
    critic.check()


def test_models_in_one_list(few_objects):
    """One actor over both models moves them together, each under its own names."""
    models = [Net(1), Net(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.1)
    actor = ActorLifecycle(models, optimizer, ("ref",), ArenaBackend(poison=0xCB), "pinned")
    before = [snapshot(model) for model in models]

    actor.sleep()
    with pytest.raises(TransitionRefused):
        models[1](TOKENS)
    with actor.weights("ref") as weights:
        assert {name.split(".")[0] for name in weights} == {"0", "1"}
        assert equal({n.removeprefix("1."): t for n, t in weights.items() if n.startswith("1.")}, before[1])
    actor.wake_up()

    assert equal([snapshot(model) for model in models], before)
    actor.close()


def test_a_broken_actor_is_alone(pair):
    """A fault, or a changed structure, of one actor is no reason to refuse the other, or a third."""
    actor, critic = pair
    with striking(actor.actor, _fail, "pause_regions"), pytest.raises(EffectFailed):
        actor.actor.sleep()
    actor.model.extra = torch.nn.Parameter(torch.zeros(2))

    third = make_rig()
    third.train()
    third.actor.sleep()
    critic.train()
    critic.actor.sleep()
    critic.actor.wake_up()

    assert actor.state == "FAULTED(pause_regions)"
    critic.check()
    third.check()
    del actor.model.extra
    actor.actor.recover()
    actor.check()


def _fail():
    raise OSError("broken")


def test_other_optimizers_step_freely(pair):
    """A third model that no actor owns trains while both sleep."""
    free = Net(8)
    optimizer = adam(free)
    for rig in pair:
        rig.actor.sleep()

    free(TOKENS).sum().backward()
    optimizer.step()

    for rig in pair:
        rig.check()
