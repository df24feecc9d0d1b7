"""Gradients that a backward outside any phase has left are lost by no way to sleep."""

from __future__ import annotations

import pytest
import torch

from lifecycle import ActorLifecycle, TransitionRefused


def _actor():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    actor = ActorLifecycle(model, optimizer, tags=("ref",))
    model(torch.ones(1, 4)).sum().backward()
    return model, actor


@pytest.mark.parametrize("way", [(), ("ref",), ("ref", "actor")])
def test_no_sleep_takes_them(way):
    """Also not behind a switch, which only moves weights."""
    model, actor = _actor()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    for tag in way:
        actor.switch(tag)
    with pytest.raises(TransitionRefused, match="gradients of a backward"):
        actor.sleep()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    actor.close()


def test_given_up_they_are_no_obstacle():
    _, actor = _actor()
    actor.discard_grads()
    actor.switch("ref")
    actor.sleep()
    actor.close()
