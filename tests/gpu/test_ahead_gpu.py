"""What an event begins ahead of its checks on a GPU: a mapping that a refused wake gives back, and looks beside copies.

Sizes are such that the driver's free bytes tell whether the weights are mapped.
"""

from __future__ import annotations

import gc
from itertools import count

import pytest
import torch
from torch import nn

import lifecycle
from lifecycle import ActorLifecycle, EffectFailed, ManifestError, UntrackedChange
from lifecycle.memory.storage import StorageBackend
from lifecycle.memory.torch_memory_saver import TorchMemorySaverBackend

pytestmark = pytest.mark.gpu

MiB = 1 << 20
WEIGHTS, NEAR = 512 * MiB, 64 * MiB
HIDDEN = torch.ones(8, 4096)
_numbers = count()


class Stack(nn.Module):
    """Linear layers of 64 MiB each, called one by one."""

    def __init__(self, layers: int = WEIGHTS // (64 * MiB)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


@pytest.fixture(params=["torch_memory_saver", "storage"])
def actor(request):
    """An actor with poisoned memory whenever it comes back."""
    name = f"ahead{next(_numbers)}"
    with lifecycle.region("weights", actor=name, memory=request.param):
        model = Stack()
    saver = request.param == "torch_memory_saver"
    backend = TorchMemorySaverBackend(name, poison=0xA5) if saver else StorageBackend(poison=0xA5)
    with ActorLifecycle(model, memory=backend, name=name) as made, torch.no_grad():
        made.model = model
        for _ in range(2):  # kernels are loaded, and page tables there
            model(HIDDEN.cuda())
            made.sleep()
            made.wake_up()
        gc.collect()  # what earlier tests have left
        yield made


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_wake_gives_back_what_was_mapped_ahead(actor, stream):
    """Nothing is left mapped, the actor sleeps on, and once the model is as it was the wake brings every byte."""
    expected, awake = values(actor.model), free()
    actor.sleep()
    asleep = free()
    assert asleep - awake >= WEIGHTS - NEAR
    weight = actor.model.layers[3].weight

    for _ in range(3):
        was, weight.data = weight.data, torch.zeros(4096, 4096, device="cuda")
        with pytest.raises(ManifestError, match=r"layers\.3\.weight"):
            actor.wake_up(stream=stream)
        assert str(actor.state) == "ASLEEP"
        weight.data = was
        assert abs(free() - asleep) <= NEAR

    actor.wake_up(stream=stream)
    actor.model(HIDDEN.cuda())
    assert abs(free() - awake) <= NEAR
    assert same(values(actor.model), expected)


def test_the_first_block_is_copied_where_its_memory_is_mapped(actor, monkeypatch):
    """Before it is asked for; nothing else is, and every byte is right in the end."""
    expected, seen = values(actor.model), []
    start = actor.memory.start_copy_in

    def looking(blocks, aside):
        torch.cuda.synchronize()
        seen.append(values(actor.model))
        return start(blocks, aside)

    monkeypatch.setattr(actor.memory, "start_copy_in", looking)
    for _ in range(3):
        actor.sleep()
        actor.wake_up(stream=True)
        assert same(values(actor.model), expected)

    ahead = actor.memory.name == "torch_memory_saver"
    assert len(seen) == 3
    for found in seen:
        there = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
        poisoned = [bool((one.view(torch.uint8) == 0xA5).all()) for one in found]
        assert there == [ahead] + [False] * (len(there) - 1)
        assert poisoned == [not here for here in there]


def test_a_block_of_neighbours_is_copied_where_its_memory_is_mapped():
    """Tensors that move as one copy, from the first wake on, when nobody has looked at their addresses yet."""
    name = f"ahead{next(_numbers)}"
    with lifecycle.region("weights", actor=name, memory="torch_memory_saver", reserve=WEIGHTS):
        model = nn.Sequential(nn.ModuleList(Stack(2) for _ in range(4)))
    backend = TorchMemorySaverBackend(name, poison=0xA5)
    ahead = []
    with ActorLifecycle(model, memory=backend, name=name) as actor, torch.no_grad():
        expected = values(model)
        start = backend.start_copy_in

        def looking(blocks, aside):
            torch.cuda.synchronize()
            ahead.append(same(values(model[0][0]), expected[:2]))
            return start(blocks, aside)

        backend.start_copy_in = looking
        for _ in range(3):
            actor.sleep()
            actor.wake_up(stream=True)
            assert same(values(model), expected)
    assert ahead == [True, True, True]


@pytest.mark.parametrize("stop", ["resume", "copy_in"])
def test_a_wake_that_is_stopped_behind_its_copy_ahead(actor, stop):
    """The memory goes back, copies and all, and the next wakes bring every byte."""
    expected = values(actor.model)
    for _ in range(2):
        actor.sleep()
        actor.wake_up(stream=True)
        actor.model(HIDDEN.cuda())
    world = actor._world
    perform = world.perform

    def stopped(action, facts, call):
        if action.do == stop:
            raise RuntimeError("stopped")
        return perform(action, facts, call)

    for _ in range(3):
        actor.sleep()
        asleep = free()
        world.perform = stopped
        with pytest.raises(EffectFailed, match="stopped"):
            actor.wake_up(stream=True)
        world.perform = perform
        assert str(actor.state) == "ASLEEP"
        assert abs(free() - asleep) <= NEAR
        actor.wake_up(stream=True)
        assert same(values(actor.model), expected)


def test_a_change_is_found_beside_its_copy(actor):
    """The copy that was made of it is given back, and the bytes stay where they are; adopted, they are copied."""
    with actor.loading("actor"):
        actor.model.layers[0].weight.mul_(2)  # so that there is no copy yet
    actor.model.layers[5].weight.data[17, 4] += 1
    changed, buffers = values(actor.model), dict(actor._world.buffers)

    with pytest.raises(UntrackedChange) as error:
        actor.sleep()

    assert list(error.value.names) == ["layers.5.weight"]
    assert str(actor.state) == "RESIDENT"
    assert actor._world.buffers == buffers
    assert same(values(actor.model), changed)
    actor.adopt()
    actor.sleep()
    actor.wake_up()
    assert same(values(actor.model), changed)


def test_many_streamed_wakes(actor):
    """Each forward reads the bytes of its own wake, whatever the one before left behind."""
    hidden = torch.randn(64, 4096, device="cuda")
    for number in range(20):
        with actor.loading("actor"):
            for layer in actor.model.layers:
                layer.weight.mul_(1 + 1e-3 * number)
        expected = actor.model(hidden)
        actor.sleep()
        actor.wake_up(stream=True)
        assert torch.equal(actor.model(hidden), expected)
