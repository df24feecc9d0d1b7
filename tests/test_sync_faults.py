"""Engines that fail or die at any step of a sync: nothing is published, who saw a byte holds nothing, a retry works."""

from __future__ import annotations

import pytest
from rig import equal, make_busy, snapshot, striking

from lifecycle import EffectFailed, EngineError, SyncFailed, TransitionRefused, VerificationFailed
from lifecycle.testing.engines import FakeEngine

ROTATE = [("old_actor", "ref")]
#: The protocol's methods in the order of a sync, and what engines that were not failing have seen by then.
STEPS = {
    "pause_generation": "untouched",
    "flush_cache": "untouched",
    "begin_update": "touched",
    "check_weights": "touched",
    "end_update": "touched",
    "continue_generation": "touched",
}


@pytest.fixture(params=["in_process", "shared_memory"])
def synced(make, request):
    """(rig, engines, first version): an actor whose engines hold the version before the present one."""
    rig = make(host="shared", protect_copies=True)
    rig.load("ref", seed=1)
    engines = [FakeEngine(name, transports=(request.param,)) for name in ("first", "second", "third")]
    rig.actor.sync(engines)
    first = rig.actor.version("actor").id
    rig.train()
    return rig, engines, first


def _paused(engine):
    return engine._state.snapshot()["paused"]


def _outcome(rig, engines):
    return [(engine.weight_version, _paused(engine)) for engine in engines]


@pytest.mark.parametrize("how", ["fail_on", "die_on"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", ["RESIDENT", "SWITCHED(ref)", "ASLEEP"])
def test_engine_fails(synced, state, step, failing, how):
    """Whichever engine fails or dies at whichever step, in whichever state: told per engine, undone, repeatable."""
    rig, engines, first = synced
    {"RESIDENT": lambda: None, "SWITCHED(ref)": lambda: rig.actor.switch("ref"), "ASLEEP": rig.actor.sleep}[state]()
    tags, published = rig.actor.tags, rig.actor.facts.published
    getattr(engines[failing], how).add(step)

    with pytest.raises(SyncFailed) as error:
        rig.actor.sync(engines, rotate=ROTATE)

    assert error.value.version == tags["actor"]
    assert "failed" in error.value.outcomes[engines[failing].name]
    assert isinstance(error.value.__cause__, EffectFailed | EngineError)
    assert (rig.state, rig.actor.moving) == (state, None)
    assert (rig.actor.tags, rig.actor.facts.published) == (tags, published)
    assert rig.actor.facts.leases == ()
    for number, engine in enumerate(engines):
        saw = STEPS[step] == "touched" and (step != "begin_update" or number <= failing)
        assert rig.actor.facts.engines[engine.name] == (None if saw or not engine.alive else first)
        if number != failing:
            assert error.value.outcomes[engine.name] == ("aborted" if saw else "untouched")
        if engine.alive and saw:
            assert (engine.weight_version, _paused(engine)) == (None, "abort")
        elif engine.alive:
            assert (engine.weight_version, _paused(engine)) == (first, None)
        else:
            assert engine.weight_version is None
    rig.check()

    engines[failing].fail_on.clear()
    engines[failing].die_on.clear()
    if not engines[failing].alive:
        engines[failing].restart()
    report = rig.actor.sync(engines)
    assert report.outcomes == dict.fromkeys(("first", "second", "third"), "updated")
    assert _outcome(rig, engines) == [(tags["actor"], None)] * 3
    assert rig.actor.facts.published == tags["actor"]
    rig.check()


@pytest.mark.parametrize("afterwards", ["abort_update", "continue_generation"])
def test_engine_that_can_not_be_told(synced, afterwards):
    """An engine that does not even hear that the update is off counts as holding nothing, whatever it says."""
    rig, engines, _ = synced
    engines[1].fail_on |= {"check_weights" if afterwards == "abort_update" else "flush_cache", afterwards}

    with pytest.raises(SyncFailed) as error:
        rig.actor.sync(engines)

    assert f"then: rollout engine second: {afterwards}" in error.value.outcomes["second"]
    assert rig.state == "RESIDENT"
    rig.check()


class Mute(FakeEngine):
    """Does not answer any more once it was paused."""

    @property
    def weight_version(self):
        if "pause_generation" in self.fail_on:
            raise EngineError(self.name, "weight_version", "no answer")
        return super().weight_version


def test_engine_that_does_not_answer(make):
    """Of an engine that was not touched and does not answer nobody knows what it holds: it counts as nothing."""
    rig = make()
    engine = Mute("mute", transports=("in_process",))
    rig.actor.sync(engine)
    engine.fail_on = {"pause_generation"}

    with pytest.raises(SyncFailed):
        rig.actor.sync(engine)

    assert (rig.state, rig.actor.facts.engines) == ("RESIDENT", {"mute": None})


class Rude(FakeEngine):
    """Raises what no engine should, and goes on doing so."""

    begun = False

    def begin_update(self, manifest, transport):
        self.begun = True
        raise ConnectionResetError("gone")

    def abort_update(self):
        if self.begun:
            raise BrokenPipeError("gone")


def test_engine_that_raises_something_else(make):
    """An engine's foreign error is a failed sync like any other, not a fault of the actor."""
    rig = make()
    engine = Rude("rude", transports=("in_process",))

    with pytest.raises(SyncFailed) as error:
        rig.actor.sync(engine)

    assert "ConnectionResetError" in str(error.value.__cause__)
    assert "then: gone" in error.value.outcomes["rude"]
    assert rig.state == "RESIDENT"
    rig.check()


def test_engine_with_other_weights(synced):
    """Weights that do not arrive as they were sent are found before any engine takes the version."""
    rig, engines, _ = synced
    engines[2].corrupted = {"body.weight"}

    with pytest.raises(SyncFailed) as error:
        rig.actor.sync(engines)

    assert isinstance(error.value.__cause__, VerificationFailed)
    assert error.value.__cause__.names == ("body.weight",)
    assert "body.weight" in error.value.outcomes["third"]
    assert _outcome(rig, engines) == [(None, "abort")] * 3
    rig.check()


def test_engine_of_another_model(synced):
    """An engine that misses a weight, or does not know one, refuses the update by name."""
    rig, engines, first = synced
    engines[0].names = frozenset(snapshot(rig.model)) - {"bias"}

    with pytest.raises(SyncFailed, match="unknown names: bias"):
        rig.actor.sync(engines)
    engines[0].names = frozenset(snapshot(rig.model)) | {"lm_head.bias"}
    with pytest.raises(SyncFailed, match=r"missing names: lm_head\.bias"):
        rig.actor.sync(engines)

    assert rig.actor.facts.published == first
    rig.check()


def test_rotation_after_success(synced):
    """Tags rotate in the given order, once every engine holds the version, and no bytes move for it."""
    rig, engines, _ = synced
    moved = rig.actor.traffic.host_to_device

    rig.actor.sync(engines, rotate=[("old_actor", "ref"), ("ref", "actor")])

    rig.expected["old_actor"], rig.expected["ref"] = rig.expected["ref"], rig.expected["actor"]
    assert rig.actor.traffic.host_to_device == moved
    rig.check()


def test_rotation_that_loses_no_copy(make):
    """The version that a rotation moves a tag away from is forgotten only where nothing else points at it."""
    rig = make_busy(make())
    engine = FakeEngine(transports=("in_process",))

    rig.actor.sync(engine, rotate=[("old_actor", "actor"), ("ref", "old_actor")])

    rig.expected["old_actor"] = rig.expected["ref"] = rig.expected["actor"]
    rig.check()
    rig.actor.sleep()
    rig.check()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("effect", ["lease_source", "publish_version", "rotate_tags", "release_source"])
def test_sync_that_fails_here(synced, effect, when):
    """Not only engines fail: whatever stops a sync leaves tags, engines and leases as a failed engine would."""
    rig, engines, first = synced
    tags, published = rig.actor.tags, rig.actor.facts.published

    def fail():
        raise OSError("broken")

    with striking(rig.actor, fail, effect, when), pytest.raises((SyncFailed, EffectFailed)):
        rig.actor.sync(engines, rotate=ROTATE)

    assert (rig.state, rig.actor.tags, rig.actor.facts.published) == ("RESIDENT", tags, published)
    assert rig.actor.facts.leases == ()
    for engine in engines:
        expected = first if effect == "lease_source" else None
        assert (engine.weight_version, rig.actor.facts.engines[engine.name]) == (expected, expected)
    rig.check()
    rig.actor.sync(engines)
    assert {engine.weight_version for engine in engines} == {tags["actor"]}


def test_syncing_a_working_version(rig):
    """A version that is still being trained is not published."""
    engine = FakeEngine(transports=("in_process",))
    rig.actor.begin_training()

    with pytest.raises(TransitionRefused, match="a training phase is open"):
        rig.actor.sync(engine)

    rig.actor.abort_training()
    assert engine.calls == []
    rig.check()


@pytest.mark.parametrize("tag", ["actor", "ref", "old_actor"])
@pytest.mark.parametrize("state", ["RESIDENT", "SWITCHED(ref)", "ASLEEP"])
def test_any_tag_from_any_state(make, state, tag):
    """The tag's own version is what arrives, from whatever copy there is, and the state stays."""
    rig = make_busy(make())
    {"RESIDENT": lambda: None, "SWITCHED(ref)": lambda: rig.actor.switch("ref"), "ASLEEP": rig.actor.sleep}[state]()
    engine = Copying(transports=("in_process",))

    report = rig.actor.sync(engine, tag=tag)

    assert equal(engine.copies, rig.expected[tag])
    assert (report.version, engine.weight_version) == (rig.actor.tags[tag],) * 2
    assert rig.state == state
    rig.check()


class Copying(FakeEngine):
    """Copies what it is given, as an engine must: the views are gone with the sync."""

    def end_update(self, version):
        super().end_update(version)
        self.copies = {name: tensor.clone() for name, tensor in self.weights.items()}
