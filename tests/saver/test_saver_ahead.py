"""A resume that is begun ahead: the saver maps in a thread, and nobody can tell until the region is resumed."""

from __future__ import annotations

from test_saver_contents import BACKEND

SLEEPING = (
    BACKEND
    + """
import threading
weights = {"a": tensor("actor.weights", 3), "b": tensor("actor.weights", 4)}
rest = {"c": tensor("actor.rest", 5)}
backend = make()
layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, weights)
backend.adopt(Slot.REST, Region.REST, rest)
backend.complete()
buffer = FakeStore().allocate(layout.nbytes)
backend.copy_out(Slot.TRAINED, buffer)
for region in (Region.WEIGHTS, Region.REST):
    backend.pause(region)
asleep = free_bytes()

def slowly(go):
    resume = book._resume
    def late(pool):
        go.wait(10)
        resume(pool)
    book._resume = late
"""
)


def test_what_was_begun_counts_as_paused_until_it_is_resumed(world):
    """The caller goes on while the saver maps; the resume then waits for it, and the bytes come back as ever."""
    world.lives(
        SLEEPING
        + """
go = threading.Event()
slowly(go)
backend.begin_resume(Region.WEIGHTS)
assert free_bytes() == asleep  # on its way: the saver has not even started
go.set()
assert book.state("actor.weights") == "active"  # whoever asks waits for it
assert Region.WEIGHTS not in backend.resident()
backend.check()
backend.resume(Region.WEIGHTS)
assert Region.WEIGHTS in backend.resident() and free_bytes() == asleep - 16 * MiB
backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)
assert (weights["a"] == 3).all() and (weights["b"] == 4).all()
backend.pause(Region.WEIGHTS)
backend.resume(Region.WEIGHTS)
"""
    )


def test_what_was_begun_can_be_cancelled(world):
    """Its memory is given back, whether or not it had come; once, and nothing where nothing was begun."""
    world.lives(
        SLEEPING
        + """
backend.cancel_resume()
for wait in (False, True):
    go = threading.Event()
    slowly(go)
    backend.begin_resume(Region.WEIGHTS)
    threading.Timer(0.1 if wait else 0, go.set).start()
    backend.cancel_resume()
    assert free_bytes() == asleep and book.state("actor.weights") == "paused"
    assert Region.WEIGHTS not in backend.resident()
    backend.cancel_resume()
backend.resume(Region.WEIGHTS)
assert free_bytes() == asleep - 16 * MiB
"""
    )


def test_one_region_is_begun_at_a_time(world):
    """A second one, and one that is resident, are resumed when they are asked for; each in any order."""
    world.lives(
        SLEEPING
        + """
backend.begin_resume(Region.WEIGHTS)
backend.begin_resume(Region.REST)
backend.resume(Region.REST)
assert backend.resident() >= {Region.REST} and Region.WEIGHTS not in backend.resident()
backend.begin_resume(Region.REST)
backend.resume(Region.WEIGHTS)
backend.begin_resume(Region.GRADS)
backend.cancel_resume()
assert backend.resident() >= {Region.WEIGHTS, Region.REST} and free_bytes() == asleep - 24 * MiB
"""
    )


def test_what_does_not_fit_is_not_begun(world):
    """Beginning says nothing; the resume does, and when there is room again it goes through."""
    world.lives(
        SLEEPING
        + """
take(free_bytes())
backend.begin_resume(Region.WEIGHTS)
assert isinstance(refusal(backend.resume, Region.WEIGHTS), room.NoRoom)
backend.cancel_resume()
assert Region.WEIGHTS not in backend.resident()
take(0)
backend.resume(Region.WEIGHTS)
assert free_bytes() == asleep - 16 * MiB
"""
    )


def test_what_fails_in_the_thread_is_raised_by_the_resume(world):
    """Not before, and a cancel passes over it."""
    world.lives(
        SLEEPING
        + """
def broken(pool):
    raise OSError("the saver is broken")

resume, book._resume = book._resume, broken
backend.begin_resume(Region.WEIGHTS)
try:
    backend.resume(Region.WEIGHTS)
except OSError as error:
    assert "broken" in str(error)
else:
    raise AssertionError("not raised")
assert Region.WEIGHTS not in backend.resident()
backend.begin_resume(Region.WEIGHTS)
backend.cancel_resume()
assert Region.WEIGHTS not in backend.resident() and free_bytes() == asleep
book._resume = resume
backend.resume(Region.WEIGHTS)
assert free_bytes() == asleep - 16 * MiB
"""
    )


def test_without_a_thread_nothing_is_begun(world):
    """A process may have no thread to give: the resume does without, and nothing is left that would run later."""
    world.lives(
        SLEEPING
        + """
def none(self):
    raise RuntimeError("can't start new thread")

start, threading.Thread.start = threading.Thread.start, none
backend.begin_resume(Region.WEIGHTS)
backend.resume(Region.WEIGHTS)
backend.pause(Region.WEIGHTS)
threading.Thread.start = start
backend.begin_resume(Region.WEIGHTS)
backend.resume(Region.WEIGHTS)
assert book.state("actor.weights") == "active" and free_bytes() == asleep - 16 * MiB
"""
    )


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parents(world):
    """It is refused, as ever."""
    world.lives(
        SLEEPING
        + """
import signal
go = threading.Event()
slowly(go)
backend.begin_resume(Region.WEIGHTS)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if isinstance(refusal(book.pause, "actor.weights"), TransitionRefused) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
go.set()
backend.resume(Region.WEIGHTS)
"""
    )


def test_what_somebody_allocates_in_stays_begun(world):
    """It can not be cancelled then, which is said; the next resume takes it as it is."""
    world.lives(
        SLEEPING
        + """
backend.begin_resume(Region.WEIGHTS)
inside, leave = threading.Event(), threading.Event()
def other():
    with book.allocating("actor.weights"):
        inside.set()
        leave.wait(10)
thread = threading.Thread(target=other)
thread.start()
inside.wait(10)
assert "region block" in str(refusal(backend.cancel_resume))
assert Region.WEIGHTS not in backend.resident()
leave.set()
thread.join()
backend.resume(Region.WEIGHTS)
backend.pause(Region.WEIGHTS)
assert free_bytes() == asleep
"""
    )


COPYING = (
    SLEEPING
    + """
from lifecycle.hoststore.base import tensor_over
from lifecycle.memory.base import Incoming
def incoming(name, buffer=buffer, slot=Slot.TRAINED):
    return Incoming(slot, buffer, layout.nbytes, frozenset({name}))
first, second = [incoming("a")], [incoming("b")]
other = FakeStore().allocate(layout.nbytes)
tensor_over(other).fill_(9)
def begin(block):
    backend.begin_resume(Region.WEIGHTS)
    backend.begin_copy_in(block)
def all_are(value, name):
    return bool((weights[name] == value).all())
"""
)


def test_a_block_is_copied_by_the_thread_that_maps_its_memory(world):
    """Its bytes are there with the memory, whatever stands there afterwards is not copied over, and the rest comes."""
    world.lives(
        COPYING
        + """
for wait in (False, True):
    go = threading.Event()
    slowly(go)
    begin(first)
    assert free_bytes() == asleep
    threading.Timer(0.1 if wait else 0, go.set).start()
    backend.resume(Region.WEIGHTS)
    assert all_are(3, "a") and all_are(0xA5, "b")
    weights["a"][7] = 77
    version = weights["a"]._version
    backend.start_copy_in([first, second], aside=True)
    assert weights["a"][7] == 77 and weights["a"]._version > version
    assert all_are(4, "b")
    backend.start_copy_in([first, second], aside=True)
    assert all_are(3, "a") and all_are(4, "b")  # once ahead, not for ever
    backend.pause(Region.WEIGHTS)
"""
    )


def test_another_block_than_the_one_foreseen_is_copied(world):
    """From another buffer, of other tensors, or of all of them."""
    world.lives(
        COPYING
        + """
everything = Incoming(Slot.TRAINED, other, layout.nbytes)
for asked in ([incoming("a", other)], [incoming("b", other), incoming("a", other)], [everything]):
    begin(first)
    backend.resume(Region.WEIGHTS)
    backend.start_copy_in([asked], aside=True)
    assert all_are(9, "a") and all_are(0xA5 if len(asked) == 1 and asked[0].names else 9, "b")
    backend.pause(Region.WEIGHTS)
"""
    )


def test_a_cancelled_resume_copies_nothing_more(world):
    """The memory goes back with what was copied there, and a later resume finds undefined bytes."""
    world.lives(
        COPYING
        + """
go = threading.Event()
slowly(go)
begin(first)
threading.Timer(0.1, go.set).start()
backend.cancel_resume()
assert free_bytes() == asleep and book.state("actor.weights") == "paused"
backend.resume(Region.WEIGHTS)
assert all_are(0xA5, "a")
backend.start_copy_in([first], aside=True)
assert all_are(3, "a")
"""
    )


def test_a_copy_that_was_not_asked_for_is_forgotten(world):
    """Resumed, and then cancelled: the next one is asked for in full."""
    world.lives(
        COPYING
        + """
begin(first)
backend.resume(Region.WEIGHTS)
backend.cancel_resume()
assert Region.WEIGHTS in backend.resident()
weights["a"].fill_(50)
backend.start_copy_in([first], aside=True)
assert all_are(3, "a")
"""
    )


def test_a_block_is_copied_ahead_only_into_what_is_mapped_ahead(world):
    """Nothing was begun; another region was; or the block lies in two, of which one was begun."""
    world.lives(
        COPYING
        + """
in_rest = incoming("c", slot=Slot.REST)
backend.begin_copy_in(first)
for begun, block in ((Region.REST, first), (Region.WEIGHTS, [in_rest]), (Region.WEIGHTS, [*first, in_rest])):
    backend.begin_resume(begun)
    backend.begin_copy_in(block)
    backend.resume(Region.REST)
    backend.resume(Region.WEIGHTS)
    assert all_are(0xA5, "a") and (rest["c"] == 0xA5).all()
    backend.start_copy_in([first], aside=True)
    assert all_are(3, "a")
    backend.pause(Region.REST)
    backend.pause(Region.WEIGHTS)
"""
    )


def test_a_copy_ahead_that_fails_is_made_again(world):
    """Because its memory did not come, or by itself: the effect does it, or says what is wrong."""
    world.lives(
        COPYING
        + """
from lifecycle.memory import moves
def broken(*_):
    raise OSError("broken")

resume, book._resume = book._resume, broken
begin(first)
try:
    backend.resume(Region.WEIGHTS)
except OSError:
    pass
else:
    raise AssertionError("not raised")
book._resume = resume
backend.cancel_resume()
backend.resume(Region.WEIGHTS)
assert all_are(0xA5, "a")
backend.pause(Region.WEIGHTS)

copy_in, moves.copy_in = moves.copy_in, broken
begin(first)
backend.resume(Region.WEIGHTS)
moves.copy_in = copy_in
backend.start_copy_in([first], aside=True)
assert all_are(3, "a")
"""
    )


def test_poison_lies_under_what_is_copied_ahead(world):
    """What no copy brings is poisoned, and what one has brought is not."""
    world.lives(
        COPYING
        + """
backend._poison = 0x5A
begin(first)
backend.resume(Region.WEIGHTS)
assert all_are(3, "a") and all_are(0x5A, "b")
"""
    )


INTERRUPTED = (
    COPYING
    + """
import signal, time
from lifecycle.memory import moves
copy_in, resume = moves.copy_in, book._resume
def in_thread():
    return threading.current_thread().name.startswith("lifecycle-beside")
def slow(call, seconds):
    def late(*arguments):
        if in_thread():
            time.sleep(seconds)
        return call(*arguments)
    return late
def struck(*_):
    raise SystemExit("SIGTERM")
signal.signal(signal.SIGALRM, struck)
def strike(call, *arguments):
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    try:
        call(*arguments)
    except SystemExit:
        return
    raise AssertionError("it ended before it was struck")
"""
)


def test_a_resume_that_is_interrupted_leaves_no_copy_running(world):
    """By a signal's handler that raises, while it waits for the mapping or for the copies: nothing writes to memory
    that has gone back, nor over what comes there next."""
    world.lives(
        INTERRUPTED
        + """
for mapping, copying in ((0.4, 0.1), (0, 0.4)):
    book._resume, moves.copy_in = slow(resume, mapping), slow(copy_in, copying)
    begin(first)
    strike(backend.resume, Region.WEIGHTS)
    backend.cancel_resume()
    if Region.WEIGHTS in backend.resident():
        backend.pause(Region.WEIGHTS)
    assert free_bytes() == asleep and book.state("actor.weights") == "paused"
    backend.resume(Region.WEIGHTS)
    backend.start_copy_in([[incoming("a", other)]], aside=True)
    time.sleep(0.6)
    assert all_are(9, "a") and all_are(0xA5, "b")
    backend.pause(Region.WEIGHTS)
"""
    )


def test_a_cancel_that_is_interrupted_leaves_no_copy_running(world):
    """Until it is asked again, or the memory is resumed for something else, streamed or not."""
    world.lives(
        INTERRUPTED
        + """
book._resume, moves.copy_in = slow(resume, 0.3), slow(copy_in, 0.3)
everything = Incoming(Slot.TRAINED, other, layout.nbytes)
for block, aside in ((None, False), ([incoming("a", other)], True), ([everything], False)):
    begin(first)
    strike(backend.cancel_resume)
    if block is None:
        strike(backend.cancel_resume)
        backend.cancel_resume()
        assert free_bytes() == asleep and book.state("actor.weights") == "paused"
        continue
    begin(block)
    backend.resume(Region.WEIGHTS)
    backend.start_copy_in([block], aside)
    time.sleep(0.7)
    assert all_are(9, "a")
    backend.pause(Region.WEIGHTS)
"""
    )


def test_half_a_block_has_ended_before_its_memory_goes(world):
    """Where its second copy fails, the first may still be under way: the device is waited for, and then unmapped."""
    world.lives(
        COPYING
        + """
from lifecycle.memory import moves, streams
log, copy_in, settle, pause, wait = [], moves.copy_in, streams.settle, book._pause, streams.wait
def second_fails(*arguments):
    if "copy" in log:
        raise RuntimeError("the second one fails")
    log.append("copy")
    copy_in(*arguments)
moves.copy_in = second_fails
streams.settle = lambda devices: (log.append("settle"), settle(devices))
streams.wait = lambda events: (log.append("wait"), wait(events))
book._pause = lambda pool: (log.append("unmap"), pause(pool))
begin([incoming("a"), incoming("b")])
backend.cancel_resume()
assert log == ["copy", "wait", "settle", "unmap"], log
"""
    )


def test_another_actor_does_not_wait_for_a_copy_ahead(world):
    """The one thread is at work, for somebody whom that actor may hold up: its resume does without."""
    world.lives(
        COPYING
        + """
from lifecycle.memory import moves
go, copy_in = threading.Event(), moves.copy_in
moves.copy_in = lambda *arguments: (go.wait(20), copy_in(*arguments))
second = make("second")
tensors = {"d": tensor("second.weights", 6)}
second.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
second.pause(Region.WEIGHTS)
begin(first)
def others():
    second.begin_resume(Region.WEIGHTS)
    second.resume(Region.WEIGHTS)
thread = threading.Thread(target=others)
thread.start()
thread.join(10)
assert not thread.is_alive() and Region.WEIGHTS in second.resident()
go.set()
backend.resume(Region.WEIGHTS)
assert all_are(3, "a")
"""
    )
