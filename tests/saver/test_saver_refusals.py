"""Everything that makes the memory saver end the process, and our refusal in front of it.

Each test shows both over the saver's shipped library: called directly it ends the process with status 1 and its
message, and through the ledger the same is refused, the process lives, and memory is what it was.
"""

from __future__ import annotations

BOTH = """
book = start()
direct = torch_memory_saver.torch_memory_saver
weights, grads = allocate("actor.weights"), allocate("actor.grads")
at(weights).fill_(3)
at(grads).fill_(4)
"""


def dies(world, calls: str) -> str:
    """Call the saver's library as if there were no ledger: below the methods that it listens at."""
    return world.dies(BOTH + "pause, resume = direct._impl.pause, direct._impl.resume\n" + calls)


def test_pausing_twice(world):
    """The second pause of a pool ends the process; ours is refused, and the pool can be resumed."""
    assert "Cannot pause allocation that is not active" in dies(world, 'pause("actor.weights"); pause("actor.weights")')

    world.lives(
        BOTH
        + """
book.pause("actor.weights")
error = refusal(book.pause, "actor.weights")
assert (error.event, error.state, error.allowed) == ("pause of pool 'actor.weights'", "paused", ("resume",))
book.resume("actor.weights")
assert (at(grads) == 4).all()
"""
    )


def test_resuming_what_is_not_paused(world):
    """A resume of an active pool ends the process; ours is refused, contents untouched."""
    assert "Cannot resume allocation that is not paused" in dies(world, 'resume("actor.weights")')

    world.lives(
        BOTH
        + """
error = refusal(book.resume, "actor.weights")
assert (error.state, error.allowed) == ("active", ("pause", "allocation"))
assert (at(weights) == 3).all()
"""
    )


def test_pausing_everything(world):
    """A pause of all pools ends the process where one is paused; there is no such call in the ledger."""
    assert "Cannot pause allocation that is not active" in dies(world, 'pause("actor.weights"); pause(None)')
    assert "Cannot pause allocation that is not active" in dies(world, 'pause("actor.weights"); pause("")')

    world.lives(
        BOTH
        + """
book.pause("actor.weights")
for name in (None, ""):
    error = refusal(book.pause, name)
    assert error.state == "the memory saver" and "actor.grads" in error.allowed, error
    assert refusal(allocate, name).advice == "Name one."
assert (at(grads) == 4).all()
"""
    )


def test_resuming_everything(world):
    """A resume of all pools ends the process where one is active; there is no such call in the ledger."""
    assert "Cannot resume allocation that is not paused" in dies(world, 'pause("actor.weights"); resume(None)')

    world.lives(
        BOTH
        + """
book.pause("actor.weights")
for name in (None, ""):
    assert "actor.grads" in refusal(book.resume, name).allowed
book.resume("actor.weights")
"""
    )


def test_allocating_in_a_paused_pool(world):
    """New memory in a paused pool is given, and the pool's next resume or pause ends the process; ours is refused."""
    mixed = 'pause("actor.weights")\nwith book._region("actor.weights"): cuda_malloc(8 * MiB)\n'
    assert "Cannot resume allocation that is not paused" in dies(world, mixed + 'resume("actor.weights")')
    assert "Cannot pause allocation that is not active" in dies(world, mixed + 'pause("actor.weights")')

    world.lives(
        BOTH
        + """
book.pause("actor.weights")
before = free_bytes()
error = refusal(allocate, "actor.weights")
assert (error.state, error.allowed) == ("paused", ("resume",))
assert free_bytes() == before
book.resume("actor.weights")
allocate("actor.weights")
"""
    )


def test_no_room_to_resume(world):
    """Memory taken by another process meanwhile ends the process; ours is refused, still paused, and works later."""
    taken = 'pause("actor.weights"); take(256 * MiB); resume("actor.weights")'
    assert "cudaError error: 2" in dies(world, taken)

    world.lives(
        BOTH
        + """
book.pause("actor.weights")
take(256 * MiB)
error = refusal(book.resume, "actor.weights")
assert isinstance(error, room.NoRoom) and isinstance(error, MemoryError)
assert (error.needed, error.free, error.device) == (8 * MiB, 0, 0)
assert book.state("actor.weights") == "paused"
take(256 * MiB - 8 * MiB - 8 * MiB - room.MARGIN + 1)
refusal(book.resume, "actor.weights")
take(256 * MiB - 8 * MiB - 8 * MiB - room.MARGIN)
assert book.resume("actor.weights") == 8 * MiB
at(weights).fill_(5)
"""
    )


def test_no_room_to_allocate(world):
    """In hook mode torch too large an allocation in a region ends the process; announced, it is refused.

    In hook mode preload the saver says so to torch, which raises its OutOfMemoryError.
    """
    program = BOTH + 'take(256 * MiB)\nallocate("actor.weights")'
    if world.mode == "torch":
        assert "cudaError error: 2" in world.dies(program)
    else:
        assert "MemoryError: cudaMalloc: 2" in world.run(program).err

    world.lives(
        BOTH
        + """
take(256 * MiB)
def announced():
    with book.allocating("actor.weights", 8 * MiB):
        raise AssertionError("entered")
error = refusal(announced)
assert (error.needed, error.free) == (8 * MiB, 0)
take(0)
allocate("actor.weights")
"""
    )


def test_pools_destroyed_outside_regions(world):
    """In hook mode torch a pool destroyed outside a region ends the process, as it is at the interpreter's end.

    So the ledger keeps pools for ever. In hook mode preload freeing is harmless, also of paused memory.
    """
    program = BOTH + 'book.pause("actor.weights")\ncuda_free(weights, 8 * MiB)'
    if world.mode == "torch":
        assert "only support interesting region" in world.dies(program)
    else:
        world.lives(program)

    world.lives(
        BOTH
        + """
import weakref
pools = [weakref.ref(pool) for pool in direct._impl._mem_pools.values()]
direct._impl._mem_pools.clear()
assert len(pools) == 2 and all(pool() is not None for pool in pools)
"""
    )


def test_pools_nobody_made(world):
    """The saver takes any name without a word, misspelt ones too; the ledger names the pools there are."""
    world.lives(BOTH + 'direct._impl.pause("actor.wieghts"); assert (at(weights) == 3).all()')

    world.lives(
        BOTH
        + """
for call in (book.pause, book.resume):
    error = refusal(call, "actor.wieghts")
    assert error.allowed == ("actor.weights", "actor.grads")
assert (at(weights) == 3).all()
"""
    )


def test_forked_processes(world):
    """A fork shares the saver's records but not the device: everything is refused there, and the parent goes on."""
    world.lives(
        BOTH
        + """
book.pause("actor.grads")
child = os.fork()
if child == 0:
    calls = (book.pause, "actor.weights"), (book.resume, "actor.grads"), (allocate, "actor.weights")
    os._exit(0 if all(refusal(*call).state == "a forked process" for call in calls) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (at(weights) == 3).all()
book.resume("actor.grads")
"""
    )


def test_open_regions(world):
    """While a region is open its pool is not paused, and no other is opened."""
    world.lives(
        BOTH
        + """
import lifecycle
with lifecycle.region("weights", memory="torch_memory_saver"):
    assert "block" in refusal(book.pause, "actor.weights").advice
    assert refusal(allocate, "actor.grads").state == "a block for pool 'actor.weights'"
    assert refusal(lifecycle.region("grads", memory="torch_memory_saver").__enter__).state == "region('weights')"
    more = cuda_malloc(8 * MiB)
assert book.pause("actor.weights") == 16 * MiB
"""
    )


def test_calls_of_others(world):
    """Others may use the saver for pools of their own; calls that touch ours are refused and name the others."""
    world.lives(
        BOTH
        + """
with direct.region("kv_cache"):
    theirs = cuda_malloc(8 * MiB)
direct.pause("kv_cache")
direct.resume("kv_cache")
for call in (direct.pause, direct.resume):
    for names in ((), (None,), ("",), ("actor.weights",)):
        error = refusal(call, *names)
        assert "kv_cache" in error.allowed[0], error
    assert "actor.weights" in error.reason
refusal(direct.region, "actor.weights")
refusal(direct.region, tag="actor.weights", enable_cpu_backup=True)
refusal(direct.cuda_graph, None, tag="actor.weights")
assert book.state("kv_cache") == "active"
assert refusal(book.pause, "kv_cache").allowed == ("actor.weights", "actor.grads")
direct.pause("kv_cache")
assert (book.state("kv_cache"), book.recorded("kv_cache")) == ("paused", "paused")
direct.resume("kv_cache")
assert book.recorded("kv_cache") == "active"
assert (at(weights) == 3).all()
"""
    )


def test_calls_below_the_ledger(world):
    """What somebody calls in the saver's library itself can't be heard, but is seen before it would end the process."""
    world.lives(
        BOTH
        + """
direct._impl.pause("actor.weights")
error = refusal(book.pause, "actor.weights")
assert error.state == "paused" and "without this ledger" in error.reason
assert book.resume("actor.weights") == 8 * MiB
book.pause("actor.grads")
direct._impl.resume("actor.grads")
assert "without this ledger" in refusal(book.resume, "actor.grads").reason
assert book.pause("actor.grads") == 8 * MiB
with book._region("actor.grads"):
    cuda_malloc(8 * MiB)
assert refusal(book.resume, "actor.grads").state == "unknown"
assert refusal(book.pause, "actor.grads").allowed == ()
"""
    )


def test_calls_that_do_not_return(world):
    """After a call of the saver that raised, what the driver says counts."""
    world.lives(
        BOTH
        + """
def interrupted(tag):
    direct._impl.pause(tag)
    raise KeyboardInterrupt
real, book._pause = book._pause, interrupted
try:
    book.pause("actor.weights")
except KeyboardInterrupt:
    pass
assert book._states["actor.weights"] == "unknown"
assert refusal(book.pause, "actor.weights").state == "paused"
book.resume("actor.weights")
"""
    )
