"""Memory or disk that is not there: the event is undone, nothing is lost, and it works once there is room."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rig import Net, equal, moments, snapshot

from lifecycle import EffectFailed, SyncFailed, TransitionRefused
from lifecycle.hoststore.shared import SharedStore
from lifecycle.testing.engines import FakeEngine

ROOT = Path(__file__).parents[1]


class Tight(SharedStore):
    """Allocates as many buffers as there is ``room`` for, or any number while that is None."""

    room: int | None = None
    error: BaseException = MemoryError("no room for a host buffer")

    def allocate(self, nbytes):
        if self.room is not None:
            if self.room == 0:
                raise self.error
            self.room -= 1
        return super().allocate(nbytes)


@pytest.fixture(params=[MemoryError("no memory"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=repr)
def tight(make, request):
    """(rig, store): three tags, none with a copy of the actor's weights, and a store without room for one."""
    store = Tight()
    store.error = request.param
    rig = make(host=store)
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.tag("old_actor", "actor")
    rig.expected["old_actor"] = rig.expected["actor"]
    rig.actor._world.pool.shrink()  # buffers that earlier versions left
    return rig, store


def _sync(rig):
    rig.actor.sync(FakeEngine("remote"))


EVENTS = {
    "sleep": lambda rig: rig.actor.sleep(),
    "switch": lambda rig: rig.actor.switch("ref"),
    "begin_training": lambda rig: rig.actor.begin_training(),
    "load": lambda rig: rig.actor._fire("load", tag="ref"),
    "sync": _sync,
    "step": lambda rig: rig.optimizer.step(),
    "using": lambda rig: rig.actor.using("ref").__enter__(),
}


@pytest.mark.parametrize("event", EVENTS)
def test_no_host_buffer(tight, event):
    """Whichever buffer can not be had, the event leaves what it found, says what it needed, and succeeds later."""
    rig, store = tight
    version, before, tags = rig.actor.version("actor"), moments(rig.optimizer), rig.actor.tags
    failures = 0
    for room in range(10):
        store.room = room
        try:
            EVENTS[event](rig)
            break
        except EffectFailed as error:
            failures += 1
            failed = error
        assert (rig.state, rig.actor.moving) == ("RESIDENT", None)
        assert (rig.actor.version("actor"), rig.actor.tags) == (version, tags)
        assert equal(moments(rig.optimizer), before)
        store.room = 0
        rig.check()

    assert failures > 0
    assert (failed.rolled_back, failed.state) == (True, "RESIDENT")
    assert failed.effect in ("copy_out_weights", "back_up_regions")
    assert failed.__cause__ is store.error
    store.room = None
    rig.check(but=("actor",) if event in ("begin_training", "step") else ())


def test_no_buffer_for_what_was_loaded(tight):
    """Weights that were loaded for another tag are dropped when they can not be kept; the tag has what it had."""
    rig, store = tight
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.actor.tag("ref", "old_actor")  # the old weights of ref leave a buffer
    rig.expected["ref"] = rig.expected["old_actor"]
    rig.actor._world.pool.shrink()

    def load():
        with rig.actor.loading("ref"):
            rig.model.load_state_dict({**rig.model.state_dict(), **Net(seed=3).state_dict()})
            store.room = 0

    with pytest.raises(EffectFailed) as error:
        load()

    assert (error.value.event, error.value.effect, error.value.rolled_back) == ("finish_load", "copy_out_loaded", True)
    assert rig.state == "RESIDENT"
    assert rig.actor.facts.load is None
    rig.check()
    store.room = None
    rig.load("ref", seed=3)
    rig.check()


def test_failed_sync_has_told_nobody(make):
    """A sync that finds no room for its host copy fails before any engine is paused."""
    store = Tight()
    rig = make(host=store)
    engine = FakeEngine("remote")
    store.room = 0

    with pytest.raises(EffectFailed) as error:
        rig.actor.sync(engine)

    assert not isinstance(error.value, SyncFailed)
    assert (engine.calls, engine.weight_version) == ([], None)
    store.room = None
    rig.actor.sync(engine)
    assert engine.weight_version == rig.actor.version("actor").id


def test_waking_without_memory(make):
    """Memory that others took is found before anything is mapped; the actor sleeps on, and wakes when it is free."""
    rig = make()
    rig.load("ref", seed=1)
    rig.actor.sleep()
    available = rig.actor.memory.available
    rig.actor.memory.available = lambda: 100

    for wake in (rig.actor.wake_up, lambda: rig.actor.wake_up("ref"), rig.actor.close):
        with pytest.raises(TransitionRefused, match=r"too little memory is free: \d+ bytes needed.*100 are free"):
            wake()
        assert rig.state == "ASLEEP"

    rig.check()
    rig.actor.memory.available = available
    rig.actor.wake_up()
    rig.check()


def test_memory_margin(make):
    """The margin is left to others."""
    rig = make(memory_margin_bytes=1 << 60)
    rig.actor.sleep()

    with pytest.raises(TransitionRefused, match=f"with a margin of {1 << 60}"):
        rig.actor.wake_up()

    assert rig.state == "ASLEEP"
    rig.check()


def test_waking_that_runs_out_of_memory(make):
    """Memory that is taken between the look and the mapping: the wake is undone, region by region."""
    rig = make()
    rig.load("ref", seed=1)
    rig.train()
    rig.actor.sleep()
    resume, calls = rig.actor.memory.resume, []

    def fail_third(region):
        calls.append(region)
        if len(calls) == 3:
            raise MemoryError
        return resume(region)

    rig.actor.memory.resume = fail_third
    with pytest.raises(EffectFailed) as error:
        rig.actor.wake_up()

    assert (error.value.effect, error.value.rolled_back, error.value.state) == ("resume_actor_regions", True, "ASLEEP")
    assert not any(rig.actor.memory.held().values())
    rig.check()
    rig.actor.wake_up()
    rig.check()


WITHOUT_ROOM = """
import errno, json, resource, sys
import psutil
sys.path.insert(0, "tests")
from rig import make_busy, make_rig
from lifecycle import EffectFailed, TransitionRefused

def limited(which, limit, events):
    told, limits = [], resource.getrlimit(which)
    for event in events:
        resource.setrlimit(which, (limit(), limits[1]))
        try:
            event()
        except EffectFailed as error:
            told.append([error.effect, error.rolled_back, repr(error.__cause__)])
        except TransitionRefused as error:
            told.append([error.event, error.reason])
        finally:
            resource.setrlimit(which, limits)
        rig.check()
    return told

told = {}
rig = make_busy(make_rig(host=f"disk:{sys.argv[1]}"))
events = [rig.actor.sleep, lambda: rig.actor.switch("ref"), lambda: rig.actor._fire("load", tag="ref")]
told["disk"] = limited(resource.RLIMIT_FSIZE, lambda: 400, events)  # no file can grow beyond this
rig.actor.sleep()
rig.check()
told["source"] = rig.actor.source("actor")
rig.actor.wake_up("ref")
rig.check()
rig.actor.close()
for host in ("pinned", "shared"):
    rig = make_busy(make_rig(host=host))
    address_space = lambda: psutil.Process().memory_info().vms + 300
    told[host] = limited(resource.RLIMIT_AS, address_space, [rig.actor.sleep])
    rig.actor.sleep()
    told[host] += limited(resource.RLIMIT_AS, address_space, [rig.actor.wake_up])
    rig.actor.wake_up()
    rig.check()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What happened in a process whose files, and then whose address space, really could not grow."""
    path = tmp_path_factory.mktemp("disk")
    command = [sys.executable, "-W", "error", "-c", WITHOUT_ROOM, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(path.iterdir()) == []
    return json.loads(done.stdout)


def test_real_disk_that_is_full(told):
    """Files that really can not be written: each event is undone, and succeeds once they can be."""
    assert told["disk"] == [["copy_out_weights", True, "OSError(27, 'File too large')"]] * 3
    assert told["source"] == "disk"


@pytest.mark.parametrize("host", ["pinned", "shared"])
def test_real_memory_that_is_full(told, host):
    """An address space that really is used up: sleep is undone and wake refused, and both work when there is room."""
    asleep, awake = told[host]

    assert asleep[:2] == ["copy_out_weights", True]
    assert "MemoryError('no room for" in asleep[2]
    assert awake[0] == "wake_up"
    assert awake[1].startswith("too little memory is free")


def test_buffers_are_used_again(make):
    """After the first cycle no host memory is asked for again, whatever is trained and switched."""
    store = Tight()
    rig = make(host=store)
    rig.load("ref", seed=1)
    for _ in range(3):
        rig.train()
        rig.actor.sleep()
        rig.actor.wake_up("ref")
        rig.actor.switch("actor")

    store.room = 0
    for _ in range(3):
        rig.train()
        rig.actor.sleep()
        rig.check()
        rig.actor.wake_up("ref")
        rig.actor.switch("actor")

    rig.check()
    assert equal(snapshot(rig.model), rig.expected["actor"])
