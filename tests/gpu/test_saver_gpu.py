"""The memory saver's backend on a GPU, in the hook mode of this process: ``test_saver_processes_gpu`` tries both."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import count

import pytest
import torch
from torch import nn

import lifecycle
from lifecycle import ActorLifecycle, ManifestError, TransitionRefused
from lifecycle.memory import hook_modes, pages, room, saver
from lifecycle.memory.choose import choose
from lifecycle.memory.torch_memory_saver import TorchMemorySaverBackend, pool_name
from lifecycle.testing.contracts import MemoryBackendContract
from lifecycle.testing.fakes import FakeStore
from states.resources import Region, Slot

pytestmark = pytest.mark.gpu

MiB = 1 << 20
NEAR = 64 * MiB  # how exactly the driver's free bytes are predicted
_numbers = count()


@pytest.fixture
def name():
    """An actor's name of this test's own, and with it pools of its own."""
    return f"test{next(_numbers)}"


class TestSaverBackend(MemoryBackendContract):
    """What every memory backend must do."""

    device = "cuda"

    def make(self) -> TorchMemorySaverBackend:
        return TorchMemorySaverBackend(f"contract{next(_numbers)}")


def build(layers: int = 8) -> nn.Sequential:
    """Linear layers of 16 MiB each, float32, the same ones each time."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(layers)])


def build_in_region(actor: str) -> nn.Sequential:
    with lifecycle.region("weights", actor=actor, memory="torch_memory_saver"):
        return build()


def adopted(model: nn.Module, backend: TorchMemorySaverBackend):
    """The model's weights taken over, and a host copy of them."""
    layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, dict(model.named_parameters()))
    backend.complete()
    buffer = FakeStore().allocate(layout.nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    return layout, buffer


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def values(model: nn.Module) -> list[torch.Tensor]:
    """Copies outside all pools."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(model: nn.Module, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(p.detach(), value) for p, value in zip(model.parameters(), expected, strict=True))


def test_memory_made_in_a_region_stays(name):
    """Adopting moves nothing that was made in its region; the driver's free bytes follow the pool's segments."""
    model = build_in_region(name)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    backend = TorchMemorySaverBackend(name, poison=0xA5)
    layout, buffer = adopted(model, backend)
    expected = values(model)
    torch.cuda.empty_cache()
    assert backend.moved_bytes == 0
    assert layout.nbytes <= backend.pool_bytes[Region.WEIGHTS] <= layout.nbytes + NEAR

    awake = free()
    assert backend.pause(Region.WEIGHTS) == layout.nbytes
    asleep = free()
    assert abs(asleep - awake - backend.pool_bytes[Region.WEIGHTS]) <= NEAR
    backend.resume(Region.WEIGHTS)
    assert abs(free() - awake) <= NEAR

    assert all((p.detach().view(torch.uint8) == 0xA5).all() for p in model.parameters())
    backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
    assert same(model, expected)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def test_memory_made_outside_is_moved_in(name):
    """Weights from outside are moved into the pool once, values kept, their old memory given back."""
    model = build()
    expected = values(model)
    torch.cuda.empty_cache()
    before = free()
    backend = TorchMemorySaverBackend(name)
    layout, buffer = adopted(model, backend)

    assert backend.moved_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert abs(free() - before) <= NEAR
    assert same(model, expected)
    backend.pause(Region.WEIGHTS)
    assert abs(free() - before - backend.pool_bytes[Region.WEIGHTS]) <= NEAR
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
    assert same(model, expected)


def test_a_pool_may_grow_between_cycles(name):
    """Optimizer state that appears after a cycle joins its pool, and the next cycle has all of it."""
    backend = TorchMemorySaverBackend(name)
    first = {"a": torch.full((1024, 1024), 1.0, device="cuda")}
    backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, first)
    backend.pause(Region.OPTIMIZER)
    with pytest.raises(TransitionRefused, match="paused"), saver.ledger().allocating(pool_name(name, Region.OPTIMIZER)):
        pass
    backend.resume(Region.OPTIMIZER)
    first["a"].fill_(3)
    second = {"b": torch.full((4096, 4096), 2.0, device="cuda")}
    layout = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, second)
    buffer = FakeStore().allocate(layout.nbytes)
    backend.copy_out(Slot.OPTIMIZER, buffer)

    backend.pause(Region.OPTIMIZER)
    backend.resume(Region.OPTIMIZER)
    backend.copy_in(Slot.OPTIMIZER, buffer, layout.nbytes)

    assert (first["a"] == 3).all()
    assert (second["b"] == 2).all()


def test_memory_nobody_attached(name):
    """What lies in a pool and belongs to no slot is named; gone, there is nothing to refuse."""
    with lifecycle.region("weights", actor=name, memory="torch_memory_saver"):
        model = build(1)
        stray = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
    backend = TorchMemorySaverBackend(name)
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, dict(model.named_parameters()))

    with pytest.raises(ManifestError, match=f"{stray.data_ptr():#x}"):
        backend.complete()
    del stray
    backend.complete()


def test_two_actors_have_pools_of_their_own(name):
    """One actor's pause leaves the other's values alone; tensors of the wrong pool are refused by name."""
    mine, theirs = build_in_region(name), build_in_region(f"{name}ref")
    expected = values(theirs)
    first, second = TorchMemorySaverBackend(name), TorchMemorySaverBackend(f"{name}ref")
    with pytest.raises(ManifestError, match=f"0.weight in pool '{name}ref.weights'"):
        first.adopt(Slot.TRAINED, Region.WEIGHTS, dict(theirs.named_parameters()))
    adopted(mine, first)
    adopted(theirs, second)

    first.pause(Region.WEIGHTS)

    assert same(theirs, expected)
    assert second.resident() == frozenset(Region)
    first.resume(Region.WEIGHTS)


def test_captured_graphs_survive(name):
    """A CUDA graph captured before the sleep replays bit-identically after the wake."""
    model = build_in_region(name)
    backend = TorchMemorySaverBackend(name, poison=0xA5)
    layout, buffer = adopted(model, backend)
    x = torch.randn(64, 2048, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
    graph.replay()
    expected = y.clone()
    assert expected.abs().sum() > 0

    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)
    graph.replay()
    assert not torch.equal(y, expected)  # of the poison
    backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
    graph.replay()

    assert torch.equal(y, expected)


def test_two_hundred_cycles_are_flat(name):
    """Random pauses, resumes and copies leave neither device nor host memory behind, and every value right."""
    draw = random.Random(0)
    model = build_in_region(name)
    backend = TorchMemorySaverBackend(name, poison=0xA5)
    layout, buffer = adopted(model, backend)
    expected = values(model)

    def step() -> None:
        if Region.WEIGHTS not in backend.resident():
            backend.resume(Region.WEIGHTS)
            backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
            assert same(model, expected)
        elif draw.random() < 0.7:
            backend.pause(Region.WEIGHTS)
        else:
            backend.copy_out(Slot.TRAINED, buffer)

    def settled() -> tuple[int, int]:
        if Region.WEIGHTS not in backend.resident():
            step()
        torch.cuda.empty_cache()
        pages.trim()
        return free(), pages.resident_anonymous()

    for _ in range(20):
        step()
    device, host = settled()
    for _ in range(200):
        step()
    device_after, host_after = settled()

    assert abs(device_after - device) <= 4 * MiB
    assert host_after - host <= 16 * MiB


def test_memory_held_by_another_process(name):
    """Where another process holds the memory a resume is refused, still paused, alive; when that has ended it works."""
    model = build_in_region(name)
    backend = TorchMemorySaverBackend(name)
    layout, buffer = adopted(model, backend)
    expected = values(model)
    torch.cuda.empty_cache()
    backend.pause(Region.WEIGHTS)
    asleep = free()
    hog = (
        "import sys, torch\n"
        "torch.zeros(1, device='cuda')\n"
        f"nbytes = torch.cuda.mem_get_info()[0] - {32 * MiB}\n"
        "held = torch.empty(nbytes, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hog]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "held"
        with pytest.raises(room.NoRoom) as caught:
            backend.resume(Region.WEIGHTS)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.needed == backend.pool_bytes[Region.WEIGHTS]
        assert Region.WEIGHTS not in backend.resident()
        assert saver.ledger().state(pool_name(name, Region.WEIGHTS)) == "paused"
        process.stdin.close()
    deadline = time.monotonic() + 20
    while free() < asleep - NEAR and time.monotonic() < deadline:
        time.sleep(0.1)

    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
    assert same(model, expected)


def test_the_driver_says_what_is_mapped(name):
    """A pool paused below the ledger is seen by asking the driver, before a second pause would end the process."""
    model = build_in_region(name)
    backend = TorchMemorySaverBackend(name)
    adopted(model, backend)
    book, pool = saver.ledger(), pool_name(name, Region.WEIGHTS)
    backend.check()
    torch.cuda.synchronize()
    book._saver._impl.pause(pool)

    with pytest.raises(TransitionRefused, match="recover"):
        backend.check()
    with pytest.raises(TransitionRefused, match="paused"):
        book.pause(pool)
    assert Region.WEIGHTS not in backend.resident()
    backend.resume(Region.WEIGHTS)
    assert book.state(pool) == "active"


def test_foreign_calls_and_hook_modes():
    """The saver's own methods refuse what touches our pools, and its hook mode is fixed."""
    book = saver.ledger()
    other = {"preload": "torch", "torch": "preload"}[book.mode]
    with book.allocating("foreign.weights"):
        torch.empty(1, device="cuda")

    with pytest.raises(TransitionRefused, match=r"foreign\.weights"):
        book._saver.pause("foreign.weights")
    with pytest.raises(TransitionRefused):
        book._saver.pause()
    with pytest.raises(TransitionRefused, match="hook mode"):
        book._saver.hook_mode = other
    book._saver.hook_mode = book.mode


def test_no_room_in_a_region(name):
    """More than there is, announced, is refused before the saver is asked for it."""
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(room.NoRoom), saver.ledger().allocating(f"{name}.weights", total + MiB):
        pass


def test_an_actor_sleeps_and_wakes(name):
    """Through the controller: a sleep gives the pool's bytes back, the next forward after the wake is bit-identical."""
    model = build_in_region(name)
    x = torch.randn(8, 2048, device="cuda")
    with torch.no_grad():
        expected = model(x)
    backend = TorchMemorySaverBackend(name, poison=0xA5)
    with ActorLifecycle(model, memory=backend) as actor:
        torch.cuda.empty_cache()
        awake = free()
        actor.sleep()
        assert abs(free() - awake - backend.pool_bytes[Region.WEIGHTS]) <= NEAR
        actor.wake_up()
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def test_auto_is_the_saver():
    """On CUDA with the saver installed "auto" is it, and says so in one line."""
    chosen = choose("auto", "cuda", "auto_is_the_saver")

    assert isinstance(chosen.backend, TorchMemorySaverBackend)
    assert chosen.why == f"memory: torch_memory_saver {saver.saver_version()}, hook mode {hook_modes.hook_mode()}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices(name):
    """A region has a pool per device under one name: both are released, taken back and restored."""
    backend = TorchMemorySaverBackend(name)
    tensors = {f"on{index}": torch.full((4096, 4096), index + 1.0, device=f"cuda:{index}") for index in range(2)}
    layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
    backend.complete()
    buffer = FakeStore().allocate(layout.nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]

    backend.pause(Region.WEIGHTS)

    for index in range(2):
        assert torch.cuda.mem_get_info(index)[0] >= before[index] + tensors[f"on{index}"].nbytes
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
    assert all((tensors[f"on{index}"] == index + 1).all() for index in range(2))
