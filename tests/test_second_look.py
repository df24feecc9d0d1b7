"""What a second look found: reads past the hooks, attaches that fail late, droppers that answer nonsense."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lifecycle import ActorLifecycle, LifecycleConfig, TransitionRefused
from lifecycle.testing.late import LateArena
from lifecycle.workspaces import Workspace, Workspaces, WorkspacesLeft


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def arriving(model: nn.Module) -> ActorLifecycle:
    """Asleep once, and awake with later blocks still poison."""
    actor = ActorLifecycle(model, memory=LateArena(poison=0xCB))
    actor.sleep()
    actor.wake_up(stream=True)
    assert actor.state.arriving
    return actor


def derivative(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda z: model(z).sum())(x)


def rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(lambda z: model(z).sum(0))(x)


@pytest.mark.parametrize("transform", [derivative, rows])
def test_a_forward_inside_a_transform_waits_outside_of_it(transform):
    """What waits reads bytes itself, which a transform of the caller's must not see."""
    model, x = stack(), torch.randn(2, 8)
    expected = transform(copy.deepcopy(model), x)
    with arriving(model) as actor:
        assert torch.equal(transform(model, x), expected)
        actor.sleep()


def test_a_model_is_not_copied_or_saved_while_asleep():
    """A deep copy and a pickle read the weights: while they are released both are refused."""
    model = stack()
    with ActorLifecycle(model) as actor:
        actor.sleep()
        with pytest.raises(TransitionRefused):
            copy.deepcopy(model)
        with pytest.raises(TransitionRefused):
            torch.save(model, io.BytesIO())
        actor.wake_up()
        assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)


def test_a_model_that_arrives_is_copied_whole():
    model = stack()
    expected = copy.deepcopy(model.state_dict())
    with arriving(model):
        copied = copy.deepcopy(model).state_dict()
        assert all(torch.equal(copied[name], expected[name]) for name in expected)


def test_an_attach_that_fails_late_leaves_the_tensors_free(tmp_path):
    """A journal that can not be written: another actor can have the model at once."""
    model = stack()
    with pytest.raises(OSError, match="No space"):
        ActorLifecycle(model, config=LifecycleConfig(journal="/dev/full"))
    with ActorLifecycle(model) as actor:
        actor.sleep()


def test_a_dropper_that_returns_nothing_is_named():
    dropped = []
    found = Workspaces([Workspace("cache", lambda: 100, lambda: dropped.append(1))], everyone=False)

    with pytest.raises(WorkspacesLeft, match="cache"):
        found.drop()
    assert dropped == [1]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_autograd_writes_is_no_leaf(persistent):
    """A recurrent state, written in a forward with gradients: no hook can be put on it, and none is needed."""
    model, inputs = Recurrent(persistent), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ActorLifecycle(model, optimizer) as actor:
        for _ in range(2):
            with actor.training():
                optimizer.zero_grad()
                model.state.detach_()
                model(inputs).sum().backward()
                optimizer.step()
            held = model.state.detach().clone()
            actor.sleep()
            actor.wake_up()
            assert not model.state._backward_hooks
            assert torch.equal(model.state, held)


class Recurrent(nn.Module):
    def __init__(self, persistent: bool):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4), persistent=persistent)

    def forward(self, inputs):
        self.state.mul_(0.5).add_(self.layer(inputs).mean(0))
        return self.layer(inputs) + self.state
