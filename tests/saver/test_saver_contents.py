"""What becomes of the bytes in the memory saver's pools: over its shipped library and the fake driver."""

from __future__ import annotations

import signal

BACKEND = """
from lifecycle.memory.torch_memory_saver import TorchMemorySaverBackend
from lifecycle.errors import ManifestError, TransitionRefused
from lifecycle.testing.fakes import FakeStore
from states.resources import Region, Slot

def make(name="actor", poison=None):
    backend = TorchMemorySaverBackend(name, poison)
    backend.device, backend.stream_ordered, backend.overlaps = "cpu", False, False
    return backend

def tensor(pool, value, nbytes=8 * MiB):
    return at(allocate(pool, nbytes), nbytes).fill_(value)

book = start()
"""


def test_a_pause_gives_memory_back(world):
    """The memory of a paused pool is free for others, and comes back at its address with bytes nobody wrote."""
    world.lives(
        """
        import psutil
        shared = lambda: psutil.Process().memory_info().shared
        book = start()
        before, nothing = free_bytes(), shared()
        place = allocate("actor.weights", 64 * MiB)
        at(place, 64 * MiB).fill_(3)
        assert free_bytes() == before - 64 * MiB and shared() >= nothing + 64 * MiB
        book.pause("actor.weights")
        assert free_bytes() == before and shared() < nothing + 16 * MiB  # code counts too
        other = allocate("other.weights", 200 * MiB)
        at(other, 200 * MiB).fill_(9)
        book.pause("other.weights")
        assert book.resume("actor.weights") == 64 * MiB
        assert book.segments("actor.weights") == (saver.Span(0, place, 64 * MiB),)
        assert (at(place, 64 * MiB) == 0xA5).all()
        """
    )


def test_states_of_several_pools(world):
    """Each as when it is asked for alone: paused, active, paused behind the ledger's back, and none."""
    world.lives(
        """
        book = start()
        pools = ("actor.weights", "actor.rest", "actor.optimizer", "nowhere")
        for pool in pools[:3]:
            allocate(pool)
            allocate(pool)
        book.pause("actor.weights")
        torch_memory_saver.torch_memory_saver._impl.pause("actor.optimizer")
        expected = dict(zip(pools, ("paused", "active", "paused", None)))
        assert book.states(pools, 1) == expected == book.states(pools) == {pool: book.state(pool) for pool in pools}
        assert book.states(()) == {}
        """
    )


def test_paused_memory_is_not_there(world):
    """Reading paused memory ends the process here (on a GPU it is an error of CUDA): nothing passes for its content."""
    ran = world.run(
        'book = start(); place = allocate("actor.weights"); book.pause("actor.weights"); at(place)[0].item()'
    )

    assert ran.status == -signal.SIGSEGV


def test_the_saver_keeps_no_copy(world):
    """A pause makes no backup: resident memory does not grow by it."""
    world.lives(
        """
        from lifecycle.memory import pages
        book = start()
        at(allocate("actor.weights", 64 * MiB), 64 * MiB).fill_(3)
        before = pages.resident_anonymous()
        book.pause("actor.weights")
        assert pages.resident_anonymous() < before + 8 * MiB
        """
    )


def test_many_cycles(world):
    """Pools go and come in any order, some grown meanwhile, and nothing is lost or left over."""
    world.lives(
        """
        import random
        draw = random.Random(0)
        book = start()
        before = free_bytes()
        pools = {name: [] for name in ("a.weights", "a.optimizer", "b.weights")}
        for name in pools:
            pools[name].append(allocate(name, 2 * MiB))
        for _ in range(300):
            name = draw.choice(list(pools))
            if book.state(name) == "paused":
                assert book.resume(name) == 2 * MiB * len(pools[name])
                for place in pools[name]:
                    assert at(place)[0] == 0xA5
                    at(place)[0] = 1
            elif len(pools[name]) < 5 and draw.random() < 0.3:
                pools[name].append(allocate(name, 2 * MiB))
            else:
                book.pause(name)
            mapped = sum(len(places) for name, places in pools.items() if book.state(name) == "active")
            assert before - free_bytes() == mapped * 2 * MiB
        """
    )


def test_the_backend_restores_what_a_pause_lost(world):
    """Tensors made in their region are not moved; paused, resumed and copied in, each is as it was, and where."""
    world.lives(
        BACKEND
        + """
weights = {"a": tensor("actor.weights", 3), "b": tensor("actor.weights", 4)}
places = {name: one.data_ptr() for name, one in weights.items()}
backend = make()
layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, weights)
backend.complete()
assert backend.moved_bytes == 0 and backend.pool_bytes == {Region.WEIGHTS: 16 * MiB}
buffer = FakeStore().allocate(layout.nbytes)
backend.copy_out(Slot.TRAINED, buffer)
before = free_bytes()
assert backend.pause(Region.WEIGHTS) == layout.nbytes
assert free_bytes() == before + 16 * MiB and Region.WEIGHTS not in backend.resident()
take(free_bytes())
assert isinstance(refusal(backend.resume, Region.WEIGHTS), room.NoRoom)
assert Region.WEIGHTS not in backend.resident()
take(0)
backend.resume(Region.WEIGHTS)
assert (weights["a"] == 0xA5).all()
backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
assert (weights["a"] == 3).all() and (weights["b"] == 4).all()
assert places == {name: one.data_ptr() for name, one in weights.items()}
"""
    )


def test_the_backend_names_memory_nobody_attached(world):
    """Memory in a pool that belongs to no slot would be lost: complete says how much, where, and in which region."""
    world.lives(
        BACKEND
        + """
weight, stray = tensor("actor.weights", 3), allocate("actor.weights", 2 * MiB)
gradient = tensor("actor.grads", 1)  # discarded by a sleep whoever owns it
backend = make()
backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
error = refusal(backend.complete)
assert error.problems == (f"{2 * MiB} bytes at {stray:#x} on cuda:0 in region weights",), error
for pool in torch_memory_saver.torch_memory_saver._impl._mem_pools.values():
    if stray in pool.segments:
        pool.segments[stray] = 2 * MiB, "inactive"
backend.complete()
"""
    )


def test_the_backend_leaves_other_pools_alone(world):
    """Tensors of another actor's or another region's pool are refused by name; so are two actors of one name."""
    world.lives(
        BACKEND
        + """
mine, ref, state = tensor("actor.weights", 3), tensor("ref.weights", 4), tensor("actor.optimizer", 5)
first, second, namesake = make(), make("ref"), make()
error = refusal(first.adopt, Slot.TRAINED, Region.WEIGHTS, {"mine": mine, "theirs": ref, "other": state})
assert error.problems == ("theirs in pool 'ref.weights'", "other in pool 'actor.optimizer'"), error
first.adopt(Slot.TRAINED, Region.WEIGHTS, {"mine": mine})
second.adopt(Slot.FROZEN, Region.WEIGHTS, {"theirs": ref})
more = tensor("actor.weights", 6)
assert "name=" in str(refusal(namesake.adopt, Slot.TRAINED, Region.WEIGHTS, {"more": more}))
first.pause(Region.WEIGHTS)
assert (ref == 4).all()
second.pause(Region.WEIGHTS)
first.resume(Region.WEIGHTS)
assert first.resident() == frozenset(Region) and Region.WEIGHTS not in second.resident()
first.forget(Slot.TRAINED)
namesake.adopt(Slot.TRAINED, Region.WEIGHTS, {"mine": mine, "more": more})
"""
    )


def test_the_backend_sees_pauses_of_others(world):
    """A pool paused in the saver's library behind the ledger's back is noticed by check, and can be taken back."""
    world.lives(
        BACKEND
        + """
weight = tensor("actor.weights", 3)
backend = make()
backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
backend.check()
torch_memory_saver.torch_memory_saver._impl.pause("actor.weights")
assert "recover" in refusal(backend.check).allowed
assert Region.WEIGHTS not in backend.resident()
backend.resume(Region.WEIGHTS)
backend.check()
"""
    )


def test_regions_without_a_pool(world):
    """A region in which nothing lies is paused and resumed without the saver; gradients in a pool go with it."""
    world.lives(
        BACKEND
        + """
backend = make()
backend.pause(Region.REST)
assert Region.REST not in backend.resident()
backend.resume(Region.REST)
allocate("actor.grads")
before = free_bytes()
backend.pause(Region.GRADS)
assert free_bytes() == before + 8 * MiB
backend.resume(Region.GRADS)
assert free_bytes() == before
"""
    )


def test_choosing(world):
    """The choice says which version and hook mode; a region made beforehand is the pool that the backend finds."""
    out = world.lives(
        BACKEND
        + """
import lifecycle
from lifecycle.memory.choose import choose
with lifecycle.region("weights", actor="ref", memory="torch_memory_saver"):
    place = cuda_malloc(8 * MiB)
chosen = choose("auto", "cuda", "ref")
chosen.backend.device = "cpu"
chosen.backend.adopt(Slot.FROZEN, Region.WEIGHTS, {"weight": at(place)})
assert chosen.backend.moved_bytes == 0 and chosen.backend.actor == "ref"
print(chosen.why)
"""
    )

    assert out.strip() == f"memory: torch_memory_saver 0.0.10, hook mode {world.mode}"


def test_pools_that_were_left_paused(world):
    """An actor that went away asleep leaves its pool paused: attaching anew is refused until it is mapped again."""
    world.lives(
        BACKEND
        + """
weight = tensor("actor.weights", 3)
gone = make()
gone.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
gone.pause(Region.WEIGHTS)
gone.forget(Slot.TRAINED)
backend = make()
error = refusal(backend.adopt, Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
assert "saver.ledger().resume('actor.weights')" in error.advice, error
book.resume("actor.weights")
backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
"""
    )


MOVING = (
    BACKEND
    + """
import contextlib, types
from lifecycle.memory import torch_memory_saver as module

# What moves tensors on CUDA, on memory of the fake driver: torch.empty in a region allocates in the pool in use, and
# cuts from the segment that was last taken and dropped, where that has room, as torch's allocator does.
plain_empty, taken, segments, rest = torch.empty, [], [], []

def empty(size, *args, **settings):
    if not Pool.in_use:
        return plain_empty(size, *args, **settings)
    need = -(-size // 512) * 512
    if rest and rest[-1][1] >= need:
        address, room = rest.pop()
        rest.append((address + need, room - need))
        taken.append(size)
        return at(address, size)
    address = cuda_malloc(-(-size // (2 * MiB)) * 2 * MiB)
    segments.append(size)
    memory = at(address, size)
    if sys._getframe(1).f_code.co_name == "_take":  # the reserve, which nobody keeps
        rest.append((address, need))
    else:
        taken.append(size)
    return memory

torch.empty = empty
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.synchronize = lambda device=None: None
torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(synchronize=lambda: None)
"""
)


def test_tensors_from_outside_are_moved_in(world):
    """They keep their values, objects, ties and views; those that were made in the pool stay; a pause has all."""
    world.lives(
        MOVING
        + """
inside = tensor("actor.weights", 3)
base = torch.arange(600.0)
outside = {"tied": torch.nn.Parameter(base[100:400].view(3, 100))}
outside["large"] = torch.full((5 * MiB,), 4, dtype=torch.uint8)
outside["row"] = outside["tied"].detach()[1]
outside["none"] = plain_empty(0, 3)
del base
place = inside.data_ptr()
backend = make()
layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"inside": inside, **outside})
assert inside.data_ptr() == place
extent = backend.moved_bytes - 5 * MiB
assert 300 * 4 <= extent <= 600 * 4 and sorted(taken) == sorted([extent, 5 * MiB])
assert len(segments) == 1 and segments[0] >= sum(taken)
assert torch.equal(outside["tied"], torch.arange(100.0, 400.0).view(3, 100))
outside["row"][0] = -1
assert outside["tied"][1, 0] == -1
spans = book.segments("actor.weights")
for one in ("tied", "large", "row"):
    assert any(span.address <= outside[one].data_ptr() < span.address + span.nbytes for span in spans), one
backend.complete()
buffer = FakeStore().allocate(layout.nbytes)
backend.copy_out(Slot.TRAINED, buffer)
backend.pause(Region.WEIGHTS)
assert book.segments("actor.weights") == spans
backend.resume(Region.WEIGHTS)
backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
assert outside["tied"][1, 0] == -1 and (outside["large"] == 4).all() and (inside == 3).all()
"""
    )


def test_moving_takes_little_room(world):
    """Tensors are moved in batches, so that little is there twice; a batch without room is refused, values kept."""
    world.lives(
        MOVING
        + """
module.BATCH = 8 * MiB
events = []
torch.cuda.empty_cache = lambda: events.append(len(taken))
tensors = {str(n): torch.full((3 * MiB,), n, dtype=torch.uint8) for n in range(5)}
make().adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
assert events == [2, 4, 5], events
assert segments == [6 * MiB, 6 * MiB, 3 * MiB], segments
assert all((one == int(n)).all() for n, one in tensors.items())

more = {f"more{n}": torch.full((3 * MiB,), n, dtype=torch.uint8) for n in range(2)}
places = {n: one.data_ptr() for n, one in more.items()}
take(256 * MiB)
error = refusal(make("other").adopt, Slot.TRAINED, Region.WEIGHTS, more)
assert isinstance(error, room.NoRoom) and error.needed >= 6 * MiB
assert places == {n: one.data_ptr() for n, one in more.items()}
assert all((one == n).all() for n, one in enumerate(more.values()))
"""
    )
