"""What still holds memory, by name: on the CPU; ``tests/gpu/test_workspaces_gpu.py`` asks a device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lifecycle import ActorLifecycle
from lifecycle.memory.holders import beside_tensors, holders, tensors_outside

SIZE = 333  # of square tensors that nobody else has
BYTES = SIZE * SIZE * 4


@pytest.fixture(autouse=True)
def no_leftovers():
    """What other tests left in reference cycles is gone."""
    gc.collect()


def square(number=0.0):
    return torch.full((SIZE, SIZE), number)


def of_this_size(named=None, owned=()):
    return [one.what for one in holders("cpu", owned, named) if one.nbytes == BYTES]


def test_the_largest_comes_first_with_shape_type_and_size():
    """One line for a storage, however many tensors are over it."""
    small, large = torch.zeros(1001, dtype=torch.float64), torch.zeros(70_001)
    view = small[1:]

    found = holders("cpu", named={})

    told = {one.nbytes: one.what for one in found}
    assert [one.nbytes for one in found] == sorted((one.nbytes for one in found), reverse=True)
    assert told[large.nbytes].startswith("Tensor of shape (70001,), torch.float32, on cpu")
    assert "torch.float64, on cpu, and 1 more over the same storage" in told[small.nbytes]
    assert view.numel() == 1000


def test_what_is_owned_is_left_out():
    """By the addresses of its memory; what lies beside it is told."""
    mine, other = square(), square()

    found = of_this_size(named={}, owned=[(mine.data_ptr(), mine.nbytes)])

    assert len(found) == 1
    assert other.shape == (SIZE, SIZE)


def test_modules_and_optimizers_are_named():
    """Parameters, buffers, attributes, gradients and optimizer state, with the module's path."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    model[0].register_buffer("mask", square())
    model[0].cache = {"keys": [square()]}
    optimizer = torch.optim.Adam(model.parameters())
    model(square(1.0)).sum().backward()
    optimizer.step()

    found = {what.partition("on cpu: ")[2] for what in of_this_size({"model": model, "optimizer": optimizer})}

    assert found == {
        "parameter weight of Linear '0'",
        "gradient of weight of Linear '0'",
        "buffer mask of Linear '0'",
        "attribute cache of Linear '0'",
        "optimizer state of Adam for parameter weight of Linear '0'",
    }


def test_modules_are_found_without_being_given():
    """Those that the collector knows."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))

    assert of_this_size() == [
        f"Parameter of shape {(SIZE, SIZE)}, torch.float32, on cpu: parameter weight of Linear '0'"
    ]
    assert model[0].bias is None


def test_frozen_modules_are_named_when_given():
    """The collector does not see them, and their tensors even less; what it sees over their storages is named."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    gc.freeze()
    view = model[0].weight.detach()

    assert of_this_size({"model": model}) == [
        f"Tensor of shape {(SIZE, SIZE)}, torch.float32, on cpu: parameter weight of Linear '0'"
    ]
    assert view.requires_grad is False


class Holding:
    def __init__(self):
        self.kept = square()


def keep_in_traceback():
    local = square()
    raise RuntimeError(str(local.shape))


def closure():
    kept = square()
    return lambda: kept


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (Holding, "attribute kept of a Holding"),
        (lambda: [square(), 2, 3], "in a list of 3"),
        (lambda: (square(),), "in a tuple of 1"),
        (lambda: {"key": square()}, "in a dict, under 'key'"),
        (closure, "a variable that a closure keeps"),
    ],
)
def test_what_refers_to_it_is_told(keep, words):
    """For what no module or optimizer has."""
    kept = keep()

    (found,) = of_this_size(named={})

    assert found.endswith(f"on cpu: {words}")
    assert kept is not None


def test_a_global_variable_is_told():
    """With the module that has it."""
    globals()["SQUARE"] = square()
    try:
        (found,) = of_this_size(named={})
    finally:
        del globals()["SQUARE"]

    assert found.endswith(f"global variable SQUARE of module {__name__}")


def test_a_kept_traceback_is_told():
    """An exception that somebody keeps holds the variables of the functions it went through."""
    try:
        keep_in_traceback()
    except RuntimeError as error:
        kept = error

    (found,) = of_this_size(named={})

    assert "a variable of keep_in_traceback (" in found
    assert found.endswith("kept by a traceback or generator")
    assert isinstance(kept, RuntimeError)


def test_asking_keeps_nothing_alive():
    """Afterwards a tensor goes as soon as its owner lets go of it."""
    tensor = square()
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        holders("cpu")
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_tensors_without_memory_are_not_told():
    """Released, on the meta device, sparse."""
    released = square()
    released.untyped_storage().resize_(0)
    others = torch.empty(SIZE, SIZE, device="meta"), torch.eye(SIZE).to_sparse()

    assert of_this_size(named={}) == []
    assert len(others) == 2


def test_after_a_sleep_the_actors_weights_are_not_told_but_a_forgotten_clone_is():
    """Through a controller: what it gave back is its own, paused."""
    model = nn.Linear(SIZE, SIZE, bias=False)
    with ActorLifecycle(model) as actor:
        clone = model.weight.detach().clone()
        actor.sleep()
        found = [one.what for one in actor.memory.holders() if one.nbytes == BYTES]
        actor.wake_up()

    assert len(found) == 1
    assert clone.nbytes == BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_context_there_is_nothing_beside_tensors():
    """And asking makes none."""
    assert beside_tensors({}) == ()
    assert holders("cuda") == tensors_outside("cuda", ()) == ()
    assert not torch.cuda.is_initialized()
