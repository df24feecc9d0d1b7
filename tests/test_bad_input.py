"""What a caller can ask wrongly: each is refused by name, before anything has happened."""

from __future__ import annotations

from argparse import Namespace

import pytest
from rig import Net, equal, snapshot
from torch import nn

from lifecycle import ActorLifecycle, EngineError, LifecycleConfig, ManifestError, TransitionRefused, UnknownTag
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.engines import FakeEngine


def _enter(context):
    with context:
        pytest.fail("entered")


def _engine():
    return FakeEngine(transports=("in_process",))


def _untouched(rig, state="RESIDENT"):
    assert rig.state == state
    assert rig.actor.moving is None
    rig.check()


# tags


@pytest.mark.parametrize(
    ("event", "ask"),
    [
        ("version", lambda actor: actor.version("nope")),
        ("source", lambda actor: actor.source("nope")),
        ("wake_up", lambda actor: actor.wake_up("nope")),
        ("switch", lambda actor: actor.switch("nope")),
        ("tag", lambda actor: actor.tag("nope", "ref")),
        ("tag", lambda actor: actor.tag("ref", "nope")),
        ("load", lambda actor: _enter(actor.loading("nope"))),
        ("using", lambda actor: _enter(actor.using("nope"))),
        ("weights", lambda actor: _enter(actor.weights("nope"))),
        ("sync", lambda actor: actor.sync(_engine(), tag="nope")),
        ("sync", lambda actor: actor.sync(_engine(), rotate=[("nope", "actor")])),
        ("sync", lambda actor: actor.sync(_engine(), rotate=[("ref", "nope")])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("state", ["RESIDENT", "ASLEEP"])
def test_unknown_tag(rig, state, event, ask):
    """Every method that takes a tag refuses one that was not declared, and names those that were."""
    if state == "ASLEEP":
        rig.actor.sleep()
    tags = rig.actor.tags

    with pytest.raises(UnknownTag, match="'nope'") as error:
        ask(rig.actor)

    assert (error.value.event, error.value.state, error.value.tag) == (event, state, "nope")
    assert error.value.known == ("actor", "ref", "old_actor")
    assert isinstance(error.value, KeyError)
    assert rig.actor.tags == tags
    _untouched(rig, state)


def test_plan_of_an_unknown_tag(rig):
    """A plan never raises: the refusal is in it."""
    plan = rig.actor.plan("switch", tag="nope")

    assert isinstance(plan.refusal, UnknownTag)
    assert (plan.target, plan.effects) == (None, ())


def test_moving_a_tag_that_may_not_move(rig):
    """'actor' follows training alone, and the tag that the device shows can not be pointed elsewhere under it."""
    with pytest.raises(TransitionRefused, match="'actor' follows training") as resident:
        rig.actor.tag("actor", "ref")
    rig.actor.switch("ref")
    with pytest.raises(TransitionRefused, match="device shows this tag") as shown:
        rig.actor.tag("ref", "old_actor")
    rig.actor.sleep()
    with pytest.raises(TransitionRefused, match="'actor' follows training"):
        rig.actor.tag("actor", "ref")

    assert (resident.value.event, resident.value.state) == ("tag", "RESIDENT")
    assert (shown.value.event, shown.value.state, shown.value.advice) == (
        "tag",
        "SWITCHED(ref)",
        "Switch to another tag first.",
    )
    _untouched(rig, "ASLEEP")


def test_pointing_a_tag_at_a_working_version(rig):
    """A version that is still being trained is nobody else's yet."""
    rig.actor.begin_training()

    with pytest.raises(TransitionRefused, match="working version"):
        rig.actor.tag("old_actor", "actor")

    rig.actor.abort_training()
    _untouched(rig)


@pytest.mark.parametrize("rotate", [("ref", "actor"), "ref", [("ref",)], [("ref", "actor", "old_actor")], ["ab"]])
def test_rotations_that_are_no_pairs(rig, rotate):
    """Also one pair that is not in a list: the form is told, with an example, before an engine hears of it."""
    with pytest.raises(ValueError, match="pairs, like") as error:
        rig.actor.sync(_engine(), rotate=rotate)

    assert repr(rotate) in str(error.value)
    _untouched(rig)


def test_rotations_may_be_a_mapping(rig):
    """From tag to what it is pointed at, in its order."""
    rig.train()
    rig.actor.sync(_engine(), rotate={"old_actor": "ref", "ref": "actor"})

    assert rig.actor.tags["ref"] == rig.actor.tags["actor"] > rig.actor.tags["old_actor"]


@pytest.mark.parametrize("rotate", [[("actor", "ref")], [("ref", "old_actor")]])
def test_rotation_of_the_shown_tag(rig, rotate):
    """A sync whose rotation would move 'actor' or the tag on the device is refused before an engine hears of it."""
    rig.actor.switch("ref")
    engine = _engine()
    tags = rig.actor.tags

    with pytest.raises(TransitionRefused, match="rotation would move") as error:
        rig.actor.sync(engine, rotate=rotate)

    assert (error.value.event, error.value.state) == ("start_sync", "SWITCHED(ref)")
    assert (engine.calls, rig.actor.tags) == ([], tags)
    _untouched(rig, "SWITCHED(ref)")


# attaching


class Holder(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.shared = parameter


@pytest.mark.parametrize(
    "again",
    [
        lambda model: model,
        lambda model: [nn.Linear(2, 2), model],
        lambda model: Holder(model.body.weight),
        lambda model: Holder(nn.Parameter(model.frozen.weight.data)),
        lambda model: Holder(nn.Parameter(model.frozen.weight.detach()[2:4])),
    ],
    ids=["same model", "in a list", "one shared parameter", "one shared storage", "a view"],
)
def test_second_attach(rig, again):
    """What one actor owns no other takes, not even one tensor of it; the first actor does not notice."""
    model = again(rig.model)

    with pytest.raises(ManifestError) as error:
        ActorLifecycle(model, memory=ArenaBackend(poison=0xCB))

    assert error.value.problems
    assert isinstance(error.value, ValueError)
    del model
    rig.actor.sleep()
    rig.actor.wake_up()
    rig.train()
    _untouched(rig)


def test_attach_after_close(rig):
    """A closed actor stands in nobody's way, also while it is still referred to."""
    rig.actor.close()

    again = ActorLifecycle(rig.model, rig.optimizer, ("ref",), ArenaBackend(poison=0xCB), "pinned")
    again.sleep()
    again.wake_up("ref")

    assert equal(snapshot(rig.model), rig.expected["actor"])
    again.close()


def test_failed_attach_can_be_repeated(few_objects, tmp_path):
    """Attaching that failed half-way leaves the model as it was and another try free to succeed, the journal closed."""
    model = Net()
    expected = snapshot(model)
    outsider = model.body.weight.data[1:]
    config = LifecycleConfig(journal=tmp_path / "journal")

    try:
        ActorLifecycle(model, config=config)
    except ManifestError:  # in here its traceback still refers to everything that was tried
        del outsider
        actor = ActorLifecycle(model, memory=ArenaBackend(poison=0xCB), host="pinned", config=config)

    actor.sleep()
    actor.wake_up()
    assert equal(snapshot(model), expected)
    actor.close()


def test_model_without_an_optimizer(make):
    """Without an optimizer there is no training, and all else works."""
    rig = make(optimizer=lambda model: None)

    with pytest.raises(TransitionRefused, match="no optimizer is attached"):
        rig.actor.begin_training()
    rig.load("ref", seed=1)
    rig.actor.sleep()
    rig.actor.wake_up("ref")

    _untouched(rig, "SWITCHED(ref)")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tags": "ref"}, "sequence"),
        ({"tags": ["ref", "ref"]}, "distinct"),
        ({"tags": ["actor"]}, "actor"),
        ({"tags": ["not a name"]}, "identifiers"),
        ({"tags": [3]}, "identifiers"),
        ({"memory": "nope"}, "'arena'"),
        ({"host": "nope"}, "'shared'"),
    ],
)
def test_wrong_arguments(options, word):
    """A wrong argument says what would be right, and the model is left alone."""
    model = Net()
    addresses = [p.data_ptr() for p in model.parameters()]

    with pytest.raises(ValueError, match=word):
        ActorLifecycle(model, **options)

    assert addresses == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"on_untracked": "ignore"},
        {"on_abort": "nothing"},
        {"when_busy": "block"},
        {"verify": "sometimes"},
        {"memory_margin_bytes": -1},
        {"memory_margin_bytes": "lots"},
        {"memory_margin_bytes": True},
        {"memory_margin_bytes": 1e9},
        {"keep": ["weights"]},
        {"keep": ["attention"]},
        {"journal_records": 0},
        {"journal_records": True},
        {"protect_copies": "yes"},
    ],
    ids=str,
)
def test_wrong_settings(settings):
    """A setting that means nothing is refused when the configuration is made, however it is made."""
    ((name, value),) = settings.items()

    with pytest.raises((ValueError, TypeError), match=name):
        LifecycleConfig(**settings)
    with pytest.raises((ValueError, TypeError), match=name):
        LifecycleConfig.from_args(Namespace(**{f"lifecycle_{name}": value}))


def test_journal_that_can_not_be_written(few_objects, tmp_path):
    """A journal in no directory is found at once, before the model is touched."""
    model = Net()
    addresses = [p.data_ptr() for p in model.parameters()]

    with pytest.raises(FileNotFoundError):
        ActorLifecycle(model, config=LifecycleConfig(journal=tmp_path / "missing" / "journal"))

    assert addresses == [p.data_ptr() for p in model.parameters()]


# engines


def test_sync_with_nobody(rig):
    """A sync needs engines that can be told apart."""
    with pytest.raises(ValueError, match="at least one engine"):
        rig.actor.sync([])
    with pytest.raises(ValueError, match="a name of its own"):
        rig.actor.sync([FakeEngine("a"), FakeEngine("a")])

    _untouched(rig)


def test_sync_without_a_way(rig):
    """An engine that can not read what this actor can offer is refused by name, before it is paused."""
    engine = FakeEngine("far", transports=("broadcast", "shared_memory"))

    with pytest.raises(EngineError, match="broadcast") as error:
        rig.actor.sync(engine)

    assert (error.value.engine, error.value.operation) == ("far", "connect")
    assert engine.calls == []
    _untouched(rig)
