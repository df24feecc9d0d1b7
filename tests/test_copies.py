"""Copies: read under a lease, never written over, compared when they come back, and the journal that tells of them."""

from __future__ import annotations

import io
import json
import stat

import pytest
import torch
from rig import Net, adam, equal, make_busy, moments, snapshot
from safetensors.torch import load_file, save_file

from lifecycle import Copy, NoReadableCopy, TransitionRefused, VerificationFailed
from lifecycle.hoststore.base import tensor_over
from lifecycle.journal import read_journal
from states.resources import Region


def _cycle(rig):
    rig.train()
    rig.actor.sleep()
    rig.actor.wake_up()


# reading


def test_lease_outlives_its_version(make):
    """What a reader holds stays as it was, however often its version is replaced and its buffer wanted."""
    rig = make_busy(make())
    rig.actor.sleep()
    old = rig.expected["actor"]

    with rig.actor.weights("actor") as weights:
        rig.actor.wake_up()
        for _ in range(3):
            _cycle(rig)
        rig.load("ref", seed=9)
        assert equal(dict(weights), old)
        assert not equal(rig.held("actor"), old)
        assert rig.actor.source("actor") is Copy.DEVICE

    rig.check()
    assert rig.actor.facts.leases == ()
    buffers = rig.actor._world.pool.allocations
    for _ in range(3):
        _cycle(rig)
    assert rig.actor._world.pool.allocations == buffers  # the lease's buffers were given back


@pytest.mark.parametrize(
    "event",
    [
        lambda rig: rig.actor.sleep(),
        lambda rig: rig.actor.switch("ref"),
        lambda rig: rig.actor.begin_training(),
        lambda rig: rig.actor.loading("ref").__enter__(),
        lambda rig: rig.optimizer.step(),
        lambda rig: rig.actor.adopt(),
        lambda rig: rig.actor.close(),
    ],
    ids=["sleep", "switch", "begin_training", "load", "step", "adopt", "close"],
)
def test_device_is_not_changed_under_a_reader(rig, event):
    """While weights() reads the device, nothing that would write there happens; afterwards it does."""
    with rig.actor.weights("actor") as weights:
        held = {name: tensor.clone() for name, tensor in weights.items()}
        with pytest.raises(TransitionRefused, match=r"weights\(\)"):
            event(rig)
        assert equal(dict(weights), held)

    rig.check()
    rig.actor.sleep()
    rig.check()


def test_nested_readers(rig):
    """Readers do not disturb each other, and the last one to leave frees the device."""
    with rig.actor.weights("actor") as outer:
        with rig.actor.weights("actor") as inner:
            assert equal(dict(inner), dict(outer))
        with pytest.raises(TransitionRefused):
            rig.actor.sleep()

    rig.actor.sleep()
    rig.check()


def test_reading_that_fails_leaves_no_lease(rig):
    """An error inside the block, or while it is entered, does not keep the device for ever."""

    def fail():
        with rig.actor.weights("ref"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    rig.actor._world.backend.views = None
    with pytest.raises(TypeError), rig.actor.weights("actor"):
        pytest.fail("entered")

    assert rig.actor.facts.leases == ()


@pytest.mark.parametrize("state", ["RESIDENT", "SWITCHED", "ASLEEP"])
def test_checkpoint_of_every_tag(rig, tmp_path, state):
    """A checkpoint can be written in every state, of every tag, and is what that tag's model would have saved."""
    {"RESIDENT": lambda: None, "SWITCHED": lambda: rig.actor.switch("ref"), "ASLEEP": rig.actor.sleep}[state]()

    for tag, expected in rig.expected.items():
        with rig.actor.weights(tag) as weights:
            save_file({name: t.contiguous() for name, t in weights.items() if name != "head.weight"}, tmp_path / tag)
        model = Net(seed=6)
        model.load_state_dict(load_file(tmp_path / tag), strict=False)
        assert equal(snapshot(model), expected)
    assert rig.state.startswith(state)
    rig.check()


@pytest.mark.parametrize("asleep", [False, True])
def test_saved_tensor_is_small(make, asleep):
    """One weight that is saved alone takes its own bytes, not those of everything beside it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    rig = make(tags=("ref",), model=model)
    if asleep:
        rig.actor.sleep()
    file = io.BytesIO()

    with rig.actor.weights("actor") as weights:
        torch.save(weights["0.bias"], file)

    assert file.tell() < 4096
    file.seek(0)
    assert equal(torch.load(file), rig.expected["actor"]["0.bias"])


def test_views_of_a_copy(make):
    """Ties, views, strides and odd dtypes are in a copy what they are on the device."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.arange(64, dtype=torch.float32)
            self.weight = torch.nn.Parameter(whole[:32].view(4, 8))
            self.tied = self.weight
            self.register_buffer("turned", whole[32:].view(8, 4).t())
            self.register_buffer("row", self.turned[1])
            self.register_buffer("flags", torch.tensor([True, False, True]))
            self.register_buffer("halves", torch.arange(5, dtype=torch.bfloat16))
            self.register_buffer("complex", torch.full((3,), 1 + 2j, dtype=torch.complex128))
            self.register_buffer("scalar", torch.tensor(7))
            self.register_buffer("empty", torch.empty(0, 3))

    rig = make(model=Odd(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
    strides = {name: tensor.stride() for name, tensor in rig.model.state_dict(keep_vars=True).items()}
    rig.actor.sleep()

    with rig.actor.weights("actor") as weights:
        assert equal(dict(weights), rig.expected["actor"])
        assert {name: tensor.stride() for name, tensor in weights.items()} == strides
        assert weights["row"].data_ptr() == weights["turned"].data_ptr() + weights["turned"].stride(0) * 4
        assert weights["tied"].data_ptr() == weights["weight"].data_ptr()
    rig.actor.wake_up()
    rig.check()


def test_sources(rig):
    """The source follows the bytes: the device while it holds them, else the copy."""
    assert {tag: rig.actor.source(tag) for tag in rig.actor.tags} == {
        "actor": Copy.DEVICE,
        "ref": Copy.HOST,
        "old_actor": Copy.HOST,
    }
    rig.actor.sleep()
    assert {rig.actor.source(tag) for tag in rig.actor.tags} == {Copy.HOST}
    rig.actor.wake_up("ref")
    assert rig.actor.source("ref") is Copy.DEVICE
    rig.actor.close()
    rig.actor.switch("ref") if rig.state != "CLOSED" else None
    with pytest.raises(NoReadableCopy):
        rig.actor.source("ref")


# copies that went bad


def _spoil(rig, tag):
    """Flip one bit of the tag's trained weights in host memory."""
    part = rig.actor.version(tag).parts["trained"]
    tensor_over(rig.actor._world.buffers[part])[5] ^= 1


def test_spoiled_copy(make):
    """A copy whose bytes changed is found when it comes back: by name, with both fingerprints, and nothing else is."""
    rig = make_busy(make())
    rig.actor.sleep()
    _spoil(rig, "actor")

    with pytest.raises(VerificationFailed) as error:
        rig.actor.wake_up()

    assert set(error.value.names) == {"embed.weight", "head.weight"}
    assert all(error.value.expected[name] != error.value.got[name] for name in error.value.names)
    assert rig.state == "ASLEEP"
    assert not any(rig.actor.memory.held().values())
    rig.actor.wake_up("ref")
    rig.check(but=("actor",))
    rig.actor.switch("old_actor")
    rig.check(but=("actor",))


def test_spoiled_copy_of_another_tag(make):
    """A switch to a spoiled copy is undone: the actor is back on the device, bit for bit, and goes on training."""
    rig = make_busy(make())
    _spoil(rig, "ref")

    with pytest.raises(VerificationFailed):
        rig.actor.switch("ref")

    assert rig.state == "RESIDENT"
    rig.check(but=("ref",))
    rig.train()
    rig.load("ref", seed=1)  # the very bytes that its copy should have had
    rig.check()
    rig.actor.switch("ref")
    rig.check()


# what stays on the device


@pytest.mark.parametrize("keep", [["optimizer"], ["rest"], ["grads"], ["optimizer", "grads", "rest"]], ids=str)
def test_kept_regions(make, keep):
    """Kept regions stay mapped and valid while the actor sleeps; everything else is as without them."""
    rig = make_busy(make(keep=keep))
    rig.actor.begin_training()
    rig.step()
    rig.actor.end_training()
    rig.expected["actor"] = snapshot(rig.model)
    before, grads = moments(rig.optimizer), [p.grad for p in rig.model.parameters()]

    rig.actor.sleep()

    held = rig.actor.memory.held()
    assert held[Region.WEIGHTS] == 0
    assert (held[Region.OPTIMIZER] > 0, held[Region.REST] > 0) == ("optimizer" in keep, "rest" in keep)
    assert ([p.grad for p in rig.model.parameters()] == grads) == ("grads" in keep)
    if "optimizer" in keep:
        assert equal(moments(rig.optimizer), before)
        assert "optimizer" not in rig.actor.traffic.per_region
    else:
        assert rig.actor.traffic.per_region["optimizer"]["device_to_host"] > 0
    rig.check()
    rig.actor.wake_up("ref")
    rig.check()
    rig.actor.switch("actor")
    assert equal(moments(rig.optimizer), before)
    rig.train()
    rig.check()


# the journal


def test_journal_on_disk(make, tmp_path):
    """Every record is on disk as it was in memory, private to its user; a last line that was cut short is left out."""
    path = tmp_path / "journal"
    rig = make_busy(make(journal=path))
    rig.actor.sleep()
    with pytest.raises(TransitionRefused):
        rig.actor.switch("ref")
    rig.actor.wake_up()
    records = list(rig.actor.journal)

    assert read_journal(path) == records
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [r.event for r in records if r.kind == "commit"][-2:] == ["sleep", "wake_up"]
    intents = [n for n, r in enumerate(records) if r.kind == "intent" and r.event == "sleep"]
    pauses = [n for n, r in enumerate(records) if r.effect == "pause_regions" and r.kind == "effect"]
    assert intents[0] < pauses[0]
    with path.open("a") as file:
        file.write('{"seq":99,"time":1.0,"kind":"com')
    assert read_journal(path) == records
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=f"{path}:{len(records) + 1} is no journal record"):
        read_journal(path)
    rig.actor.close()


def test_journal_that_was_there(make, tmp_path):
    """A second run appends: what an earlier one told stays."""
    path = tmp_path / "journal"
    for _ in range(2):
        rig = make(journal=path)
        rig.actor.sleep()
        rig.actor.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines if line["kind"] in ("attach", "commit")] == ["attach", "sleep", "close"] * 2


def test_newest_records_are_kept(make):
    """In memory only so many records are kept."""
    rig = make(journal_records=5)
    rig.actor.sleep()

    assert len(rig.actor.journal) == 5
    assert rig.actor.journal[-1].kind == "commit"
    assert [record.seq for record in rig.actor.journal[-3:]] == sorted(r.seq for r in rig.actor.journal)[-3:]


def test_traffic_is_what_the_journal_says(make):
    """Bytes moved are counted once, in all, per region and in the records; what is there already is not moved."""
    rig = make_busy(make())
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.actor.sleep()

    for direction in ("device_to_host", "host_to_device"):
        total = sum(record.nbytes for record in rig.actor.journal if record.direction == direction)
        assert total == getattr(rig.actor.traffic, direction) > 0
        assert total == sum(by.get(direction, 0) for by in rig.actor.traffic.per_region.values())
    last = [record for record in rig.actor.journal if record.event == "sleep"]
    start = max(n for n, record in enumerate(last[:-1]) if record.kind == "commit")
    assert all(record.nbytes == 0 for record in last[start + 1 :] if record.direction is not None)


def test_fresh_model_keeps_nothing_of_an_old_actor(make):
    """Attached again, a closed actor's model starts at step 0 with one version that every tag points at."""
    rig = make_busy(make())
    rig.actor.close()

    again = make(model=rig.model, optimizer=lambda model: rig.optimizer)

    assert again.actor.version("actor").step == 0
    assert len(set(again.actor.tags.values())) == 1
    assert equal(again.expected["ref"], rig.expected["actor"])
    before = moments(rig.optimizer)
    again.actor.sleep()
    again.actor.wake_up()
    assert equal(moments(rig.optimizer), before)
    again.check()
    assert adam(rig.model).state == {}
