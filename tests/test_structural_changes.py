"""A model or an optimizer that is not what was attached is noticed before anything happens, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from rig import Net, adam, equal, moments, snapshot
from torch import nn

from lifecycle import ManifestError, TransitionRefused
from lifecycle.testing.engines import FakeEngine


def _assigned(module, name, value):
    """Sets an attribute; returns how to put the old one back."""
    was = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, was)


def _rebound(parameter, data):
    """Assigns ``.data``; returns how to bind the old bytes again."""
    was = parameter.detach()
    parameter.data = data(parameter.data)
    return lambda: setattr(parameter, "data", was)


def _added(rig):
    rig.model.extra = nn.Parameter(torch.zeros(3))
    return lambda: delattr(rig.model, "extra")


def _added_buffer(rig):
    rig.model.body.register_buffer("seen", torch.zeros(1))
    return lambda: delattr(rig.model.body, "seen")


def _added_attribute(rig):
    rig.model.cache = {"keys": [torch.zeros(2)]}
    return lambda: delattr(rig.model, "cache")


def _added_module(rig):
    rig.model.adapter = nn.Linear(8, 8)
    return lambda: delattr(rig.model, "adapter")


def _removed(rig):
    was = rig.model.frozen.bias
    del rig.model.frozen.bias
    return lambda: setattr(rig.model.frozen, "bias", was)


def _removed_module(rig):
    return _assigned(rig.model, "frozen", nn.Identity())


def _replaced(rig):
    return _assigned(rig.model.body, "weight", nn.Parameter(rig.model.body.weight.detach().clone()))


def _replaced_buffer(rig):
    return _assigned(rig.model, "bias", rig.model.bias.clone())


def _tied(rig):
    return _assigned(rig.model.frozen, "weight", rig.model.body.weight)


def _untied(rig):
    return _assigned(rig.model.head, "weight", nn.Parameter(rig.model.embed.weight.detach().clone()))


def _cast(rig):
    undo = [_rebound(p, lambda data: data) for p in rig.model.body.parameters()]
    rig.model.body.to(torch.bfloat16)
    return lambda: [one() for one in undo]


def _reshaped(rig):
    return _rebound(rig.model.body.weight, lambda data: data.view(4, 16))


def _transposed(rig):
    return _rebound(rig.model.body.weight, lambda data: data.t())


def _moved(rig):
    return _rebound(rig.model.embed.weight, lambda data: data.clone())


def _regrouped(rig):
    rig.optimizer.add_param_group({"params": [rig.model.frozen.weight]})
    return rig.optimizer.param_groups.pop


def _dropped(rig):
    was = rig.optimizer.param_groups[0]["params"]
    rig.optimizer.param_groups[0]["params"] = was[1:]
    return lambda: rig.optimizer.param_groups[0].update(params=was)


CHANGES = {
    _added: "extra: added",
    _added_buffer: "body.seen: added",
    _added_attribute: "cache.keys.0: added",
    _added_module: "adapter.weight: added",
    _removed: "frozen.bias: removed",
    _removed_module: "frozen.weight: removed",
    _replaced: "body.weight: replaced",
    _replaced_buffer: "bias: replaced",
    _tied: "frozen.weight: tied to body.weight",
    _untied: "head.weight: untied from embed.weight",
    _cast: "body.weight: cast from torch.float32 to torch.bfloat16",
    _reshaped: "body.weight: reshaped from (8, 8) to (4, 16)",
    _transposed: "body.weight: given other bytes or strides",
    _moved: "embed.weight: given other bytes or strides",
    _regrouped: "optimizer: has a new parameter, frozen.weight",
    _dropped: "optimizer: no longer has the parameter embed.weight",
}
EVENTS = {
    "sleep": lambda actor: actor.sleep(),
    "switch": lambda actor: actor.switch("ref"),
    "wake_up": lambda actor: actor.wake_up(),
    "wake_up(ref)": lambda actor: actor.wake_up("ref"),
    "begin_training": lambda actor: actor.begin_training(),
    "load": lambda actor: actor.loading("ref").__enter__(),
    "adopt": lambda actor: actor.adopt(),
    "sync": lambda actor: actor.sync(FakeEngine(transports=("in_process",))),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_change_is_noticed(rig, change, event):
    """The event is refused by the names of what changed, the state is what it was, and undoing it is a way out."""
    if event.startswith("wake_up"):
        rig.actor.sleep()
    state, tags = rig.state, rig.actor.tags
    undo = change(rig)

    with pytest.raises(ManifestError) as error:
        EVENTS[event](rig.actor)

    assert CHANGES[change] in "; ".join(error.value.problems)
    assert (rig.state, rig.actor.tags) == (state, tags)
    undo()
    rig.check()
    EVENTS[event](rig.actor)
    if event == "begin_training":
        rig.actor.abort_training()
    if event != "load":
        rig.check()


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in (_regrouped, _dropped)], ids=lambda c: c.__name__)
def test_closing_a_changed_model(rig, change):
    """close() is the other way out: what the model is now is the caller's again, as it is."""
    change(rig)
    now = snapshot(rig.model)

    rig.actor.close()

    assert rig.state == "CLOSED"
    assert equal(snapshot(rig.model), now)


@pytest.mark.parametrize("event", ["sleep", "switch", "begin_training"])
def test_shared_storage(rig, event):
    """share_memory() moves bytes inside a storage that stays the same object: noticed all the same."""
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.model.share_memory()

    with pytest.raises(ManifestError):
        EVENTS[event](rig.actor)

    assert rig.state == "RESIDENT"
    rig.check()


def test_change_inside_a_phase(rig):
    """A parameter that was replaced in a phase would be trained in vain: its end is refused, undone it works."""
    rig.actor.begin_training()
    rig.step()
    undo = _replaced(rig)

    with pytest.raises(ManifestError, match=r"body\.weight"):
        rig.actor.end_training()

    assert rig.actor.facts.phase is not None
    rig.check(but=("actor",))
    undo()
    rig.actor.end_training()
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()


def test_load_that_assigns(rig):
    """load_state_dict(assign=True) puts other tensors in: the load is refused, and what was shown comes back."""
    was = dict(rig.model.named_parameters())

    with pytest.raises(ManifestError, match="replaced"), rig.actor.loading("ref"):
        rig.model.load_state_dict({**rig.model.state_dict(), **Net(seed=4).state_dict()}, assign=True)

    assert rig.state == "RESIDENT"
    for name, parameter in was.items():
        module, _, leaf = name.rpartition(".")
        setattr(rig.model.get_submodule(module), leaf, parameter)
    rig.model.head.weight = rig.model.embed.weight
    with pytest.raises(ManifestError, match="bias"):
        rig.actor.sleep()


# optimizers


def test_step_of_another_optimizer(rig):
    """An optimizer that was not attached is refused before it writes a byte; the attached one goes on."""
    other = adam(rig.model)
    rig.optimizer.zero_grad()
    rig.backward()

    with pytest.raises(ManifestError, match=r"another optimizer, AdamW") as error:
        other.step()

    assert "embed.weight" in error.value.problems
    assert not other.state
    rig.check()
    rig.optimizer.step()
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()


def test_loaded_optimizer_state_is_kept(rig):
    """Moments loaded outside a phase are the optimizer's from there on, through sleep and wake."""
    saved = rig.optimizer.state_dict()
    rig.train(3)
    rig.optimizer.load_state_dict(saved)
    loaded = moments(rig.optimizer)

    rig.actor.sleep()
    rig.actor.wake_up()

    assert equal(moments(rig.optimizer), loaded)
    rig.actor.begin_training()
    rig.actor.abort_training()
    assert equal(moments(rig.optimizer), loaded)
    rig.train()
    assert not equal(moments(rig.optimizer), loaded)
    rig.check()


@pytest.mark.parametrize("slept", [True, False])
def test_abort_after_loaded_optimizer_state(rig, slept):
    """An aborted phase puts the loaded moments back where a copy of them exists, else it keeps its result whole."""
    rig.actor.sleep()
    rig.actor.wake_up()
    saved = rig.optimizer.state_dict()
    rig.optimizer.load_state_dict({**saved, "state": {k: _halved(v) for k, v in saved["state"].items()}})
    loaded = moments(rig.optimizer)
    if slept:
        rig.actor.sleep()
        rig.actor.wake_up()

    rig.actor.begin_training()
    rig.step()
    result, after = snapshot(rig.model), moments(rig.optimizer)
    rig.actor.abort_training()

    if not slept:
        rig.expected["actor"] = result
    assert equal(moments(rig.optimizer), loaded if slept else after)
    rig.check()


def _halved(entry):
    return {name: value / 2 if name != "step" else value for name, value in entry.items()}


def test_loading_optimizer_state_inside_a_phase(rig):
    """An open phase's moments are in use."""
    saved = rig.optimizer.state_dict()
    with rig.actor.training():
        rig.step()
        before = moments(rig.optimizer)
        with pytest.raises(TransitionRefused) as error:
            rig.optimizer.load_state_dict(saved)
        assert equal(moments(rig.optimizer), before)

    assert (error.value.event, error.value.state) == ("load_optimizer_state_dict", "RESIDENT")
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()


def test_cleared_optimizer_state(rig):
    """State that the caller threw away stays away; the next step makes new state that is taken over."""
    rig.optimizer.state.clear()

    rig.actor.sleep()
    rig.actor.wake_up()

    assert not rig.optimizer.state
    rig.train()
    before = moments(rig.optimizer)
    rig.actor.sleep()
    rig.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    rig.check()
