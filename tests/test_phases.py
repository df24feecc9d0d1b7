"""Training phases that end well, badly, or not at all: weights, moments and versions are what the setting says."""

from __future__ import annotations

import pytest
import torch
from rig import TOKENS, adam, equal, make_busy, moments, snapshot, striking

from lifecycle import EffectFailed, TransitionRefused


class Wrong(Exception):
    """What goes wrong in a phase here."""


def _lbfgs(model):
    return torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)


def _counting(model):
    """Its state has plain numbers beside tensors, and it makes new tensors at every step."""

    class Counting(torch.optim.Optimizer):
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(p)) + p.grad
                state.setdefault("history", []).append(state["mean"].norm())
                p.data.sub_(0.05 * state["mean"])

    return Counting([p for p in model.parameters() if p.requires_grad], {})


def _closure(rig):
    def closure():
        rig.optimizer.zero_grad()
        loss = rig.model(TOKENS).square().mean()
        loss.backward()
        return loss

    return closure


def _step(rig):
    rig.optimizer.step(_closure(rig)) if isinstance(rig.optimizer, torch.optim.LBFGS) else rig.step()


def _phase(rig, *steps, error=None):
    """One phase of these steps, which then raises."""
    with rig.actor.training():
        for step in steps:
            step(rig)
        result = snapshot(rig.model), moments(rig.optimizer)
        if error is not None:
            error.result = result
            raise error
    return result


def _fail_in_phase(rig, *steps):
    """What there was when the phase failed."""
    with pytest.raises(Wrong) as raised:
        _phase(rig, *steps, error=Wrong())
    return raised.value.result


OPTIMIZERS = {"adam": adam, "lbfgs": _lbfgs, "counting": _counting}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exception_restores(make, optimizer):
    """Where copies exist, an exception puts back weights, moments and version; training goes on as if nothing was."""
    rig, twin = make(optimizer=OPTIMIZERS[optimizer]), make(optimizer=OPTIMIZERS[optimizer])
    rig.expected["actor"], before = _phase(rig, _step)
    _phase(twin, _step)
    rig.actor.sleep()
    rig.actor.wake_up()
    version = rig.actor.version("actor")

    _fail_in_phase(rig, _step, _step)

    assert rig.actor.version("actor") == version
    assert equal(moments(rig.optimizer), before)
    rig.check()
    rig.actor.sleep()
    rig.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    assert equal([*_phase(rig, _step)], [*_phase(twin, _step)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_first_phase_leaves_no_state(make, optimizer):
    """Optimizer state that appeared in an aborted phase is gone again: the next phase is a first one."""
    rig, twin = make(optimizer=OPTIMIZERS[optimizer]), make(optimizer=OPTIMIZERS[optimizer])

    _fail_in_phase(rig, _step)

    assert moments(rig.optimizer) == []
    rig.check()
    rig.actor.sleep()
    rig.actor.wake_up()
    assert equal([*_phase(rig, _step)], [*_phase(twin, _step)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False])
def test_abort_after_an_end_that_failed(make, optimizer, first):
    """A phase whose end took over new optimizer state and then failed is still open; aborted, all is as before it."""
    rig, twin = make(optimizer=OPTIMIZERS[optimizer]), make(optimizer=OPTIMIZERS[optimizer])
    if not first:
        rig.expected["actor"], _ = _phase(rig, _step)
        _phase(twin, _step)
    rig.actor.sleep()
    rig.actor.wake_up()
    before = moments(rig.optimizer)

    rig.actor.begin_training()
    _step(rig)
    with striking(rig.actor, _raise_memory_error, "freeze_version"), pytest.raises(EffectFailed) as error:
        rig.actor.end_training()
    assert (error.value.effect, error.value.rolled_back) == ("freeze_version", True)
    assert rig.actor.facts.phase is not None
    rig.actor.abort_training()

    assert equal(moments(rig.optimizer), before)
    rig.check()
    rig.actor.sleep()
    rig.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    assert equal([*_phase(rig, _step)], [*_phase(twin, _step)])


def test_exception_without_a_copy_keeps(make):
    """Where the base has no copy, because nothing else needed it, the result is kept as a version, whole."""
    rig = make(tags=())
    version = rig.actor.version("actor")

    result, state = _fail_in_phase(rig, _step)

    assert rig.actor.version("actor").id != version.id
    assert rig.actor.version("actor").step == version.step + 1
    assert equal(moments(rig.optimizer), state)
    rig.expected["actor"] = result
    rig.check()


def test_exception_keeps_by_setting(make):
    """With on_abort='keep' what was trained so far is a version of its own, though a copy of the base exists."""
    rig = make_busy(make(on_abort="keep"))
    rig.actor.sleep()
    rig.actor.wake_up()

    result, state = _fail_in_phase(rig, _step)

    rig.expected["actor"] = result
    assert equal(moments(rig.optimizer), state)
    rig.check()
    rig.actor.sleep()
    rig.check()


@pytest.mark.parametrize("on_abort", ["restore", "keep"])
def test_exception_before_a_byte_was_written(make, on_abort):
    """A phase that changed nothing leaves the version it found, by fingerprint."""
    rig = make_busy(make(on_abort=on_abort))
    version, before = rig.actor.version("actor"), moments(rig.optimizer)

    _fail_in_phase(rig, lambda rig: rig.backward())

    assert rig.actor.version("actor") == version
    assert equal(moments(rig.optimizer), before)
    rig.check()


def test_grads_come_back_as_zeros(rig):
    """Gradients that a sleep discarded are zeros in the next phase, so that code that adds to them goes on working."""
    rig.actor.sleep()
    rig.actor.wake_up()
    assert all(p.grad is None for p in rig.model.parameters())

    rig.actor.begin_training()

    assert all(p.grad is not None and not p.grad.any() for p in rig.model.parameters() if p.requires_grad)
    rig.actor.abort_training()


def test_nested_phases(rig):
    """A phase inside a phase is refused, and the outer one goes on."""
    with rig.actor.training():
        with pytest.raises(TransitionRefused) as error, rig.actor.training():
            pytest.fail("entered")
        rig.step()
    rig.expected["actor"] = snapshot(rig.model)

    assert (error.value.event, error.value.reason) == ("begin_training", "a training phase is open")
    rig.check()


@pytest.mark.parametrize("end", ["end_training", "abort_training"])
def test_ending_what_was_not_begun(rig, end):
    """Without an open phase there is nothing to end."""
    with pytest.raises(TransitionRefused, match="no training phase is open") as error:
        getattr(rig.actor, end)()

    assert error.value.event == end
    rig.check()


def test_exception_while_the_abort_fails(rig):
    """The first exception is the one that is raised; what failed after it is a note, and the phase can be ended."""
    with striking(rig.actor, _raise_memory_error, "settle_phase"), pytest.raises(Wrong) as error:
        _phase(rig, _step, error=Wrong())

    assert "abort_training failed too" in error.value.__notes__[0]
    assert rig.actor.facts.phase is not None
    rig.check(but=("actor",))
    rig.actor.end_training()
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()


def _raise_memory_error():
    raise MemoryError


# steps outside phases


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_implicit_step(make, optimizer):
    """A step outside a phase is a phase of one step, also one that runs forward and backward by itself."""
    rig = make(optimizer=OPTIMIZERS[optimizer])
    version = rig.actor.version("actor")

    _step(rig)

    assert rig.actor.version("actor").step == version.step + 1
    assert rig.actor.facts.phase is None
    rig.expected["actor"] = snapshot(rig.model)
    rig.check()
    before = moments(rig.optimizer)
    rig.actor.sleep()
    rig.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    rig.check()


def _raise_wrong():
    raise Wrong


@pytest.mark.parametrize(
    "then",
    [
        lambda rig: rig.actor.sleep(),
        lambda rig: rig.actor.switch("ref"),
        lambda rig: rig.actor.begin_training(),
        lambda rig: rig.step(),
        lambda rig: rig.model.load_state_dict(rig.model.state_dict()),
        lambda rig: rig.optimizer.load_state_dict(rig.optimizer.state_dict()),
        lambda rig: rig.actor.close(),
    ],
    ids=["sleep", "switch", "begin_training", "step", "load_state_dict", "optimizer.load_state_dict", "close"],
)
def test_implicit_step_that_raises(rig, then):
    """A step that raised is aborted by whatever comes next: there is no open phase to be told about."""
    version, before = rig.actor.version("actor"), moments(rig.optimizer)
    with pytest.raises(Wrong):
        rig.optimizer.step(_raise_wrong)
    rig.check(but=("actor",))

    then(rig)

    phase = rig.actor.facts.phase
    assert phase is None or not phase.implicit
    if rig.state == "CLOSED":
        assert equal(snapshot(rig.model), rig.expected["actor"])
        assert equal(moments(rig.optimizer), before)
        return
    if then.__code__.co_names[-1] == "step":
        rig.expected["actor"] = snapshot(rig.model)
    else:
        assert rig.actor.facts.phase is not None or rig.actor.version("actor") == version
        assert equal(moments(rig.optimizer), before) or rig.state == "ASLEEP"
    rig.check(but=("actor",) if phase is not None else ())
