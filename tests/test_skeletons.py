"""Optimizer state in host memory beside parameters elsewhere: nobody's to release, and put back with its content."""

from __future__ import annotations

import torch

from lifecycle.adapters.plain import PlainAdapter
from lifecycle.adapters.skeletons import kept, put_back


def adapter_on(device: str) -> tuple[PlainAdapter, torch.optim.Optimizer]:
    """After one step of torch's default Adam, whose ``step`` is in host memory; "meta" stands for an accelerator."""
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return PlainAdapter(model, optimizer), optimizer


def test_state_on_the_host_stays_there():
    """Beside an accelerator's parameters the step is not owned; on the CPU alone everything is."""
    for device, steps in (("meta", 0), ("cpu", 2)):
        adapter, _ = adapter_on(device)
        owned = adapter.optimizer_tensors()
        assert sum(one.name.endswith("step") for one in owned) == steps
        assert sum(one.name.endswith("exp_avg") for one in owned) == 2


def test_its_values_come_back_with_the_content():
    """A restore puts the same step tensors back to the values that they had, as an aborted phase needs."""
    adapter, optimizer = adapter_on("meta")
    skeleton = adapter.optimizer_skeleton()
    steps = [entry["step"] for entry in optimizer.state.values()]
    optimizer.step()
    assert [float(step) for step in steps] == [2.0, 2.0]

    for _ in range(2):  # a skeleton may be put back again
        adapter.rebuild_optimizer(skeleton)
        assert [entry["step"] for entry in optimizer.state.values()] == steps
        assert all(entry["step"] is step for entry, step in zip(optimizer.state.values(), steps, strict=True))
        assert [float(step) for step in steps] == [1.0, 1.0]
        optimizer.step()


def test_containers_are_copied_and_the_rest_is_not():
    """Lists and tuples are followed; without ``host`` a tensor's value is its owner's business."""
    tensor = torch.zeros(2)
    for host, value in ((True, 0.0), (False, 1.0)):
        state = {"a": [(tensor, 5)], "b": "text"}
        skeleton = kept(state, host)
        state["a"].append("later")
        tensor.fill_(1.0)
        found = put_back(skeleton)
        assert found["a"][0][0] is tensor
        assert found == {"a": [(tensor, 5)], "b": "text"}
        assert tensor.tolist() == [value] * 2
