"""The whole controller against a dictionary of tensors: random sequences of events, and those that once failed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from lifecycle import LifecycleConfig
from lifecycle.testing.acting import Acting
from lifecycle.testing.driving import POISON
from lifecycle.testing.late import TightLateArena
from lifecycle.testing.stateful import LifecycleMachine
from lifecycle.testing.subjects import Stacked, Subject, make_subject
from lifecycle.testing.syncing import EngineTrouble, Syncing
from lifecycle.testing.trouble import Fault

# Explaining a failure traces every line that runs, and takes far longer than finding it.
COMMON = settings(
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.timeout(1200)  # of which making a failure small may take five minutes
class TestLifecycle(LifecycleMachine.TestCase):
    """The same sequences every time."""

    settings = settings(COMMON, max_examples=120, stateful_step_count=40, derandomize=True)


class LateMachine(LifecycleMachine):
    """On memory where bytes are late and exchanges go by chunks, with a model that is streamed."""

    def make_subject(self, optimizer: str) -> Subject:
        return make_subject(optimizer, Stacked)

    def make_memory(self) -> TightLateArena:
        return TightLateArena(poison=POISON)


@pytest.mark.timeout(1200)
class TestLateLifecycle(LateMachine.TestCase):
    """The same sequences every time."""

    settings = settings(COMMON, max_examples=60, stateful_step_count=40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestLateLifecycleAtLength(LateMachine.TestCase):
    """More and longer ones, different every time."""

    settings = settings(COMMON, max_examples=1000, stateful_step_count=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestLifecycleAtLength(LifecycleMachine.TestCase):
    """More and longer ones, different every time."""

    settings = settings(COMMON, max_examples=1000, stateful_step_count=50)


class Driven(Acting, Syncing):
    """Without Hypothesis."""


@pytest.fixture(name="drive")
def _drive(few_objects):
    """drive(...): an actor, attached; ``distinct`` tags where asked. What is left of it is closed and checked."""
    made = []

    def drive(distinct=True, busy=False, host="shared", optimizer="adamw", **config):
        driven = Driven()
        driven.prepare(optimizer)
        driven.attach(LifecycleConfig(protect_copies=True, **config), host, busy)
        if distinct:
            driven.make_distinct()
        driven.check()
        made.append(driven)
        return driven

    yield drive
    for driven in made:
        driven.check()
        driven.shut()


def strike(driven, event, effect, *arguments, number=0, **more):
    """A fault in the effect's first action, or a later one, of an event asked for now."""
    found = [planned.name for planned in driven.actor.plan(event, *arguments).effects for _ in planned.actions]
    return Fault(found.index(effect) + number, **more)


def test_close_while_asleep_brings_groups_back(drive):
    """Process groups that a sleep took down are up again when the life cycle ends."""
    drive(busy=True).go(None)


@pytest.mark.parametrize("asleep", [True, False])
def test_close_is_refused_under_a_reader(drive, asleep):
    """A copy that is being read is not freed under its reader, on the host either."""
    driven = drive()
    if asleep:
        driven.go(None)
    driven.start_reading("ref")


def test_close_after_a_fault_brings_everything_back(drive):
    """From FAULTED too close() leaves weights, optimizer state and the rest, where copies are."""
    driven = drive(busy=True)
    driven.write_rest(3)
    driven.go(None)
    driven.go("actor", strike(driven, "wake_up", "restore_weights", "actor", again=True))
    assert driven.faulted
    driven.shut()
    driven.attach(LifecycleConfig(), "pinned", busy=False)


@pytest.mark.parametrize("region", ["rest", "optimizer"])
def test_recover_with_a_kept_region(drive, region):
    """What stays on the device while asleep needs no copy, also when a sleep failed half-way."""
    driven = drive(keep=[region])
    driven.go(None, strike(driven, "sleep", "pause_regions", number=1))
    assert driven.faulted
    driven.recover()
    assert str(driven.actor.state) == "ASLEEP"


def test_recover_keeps_what_changed_since_its_copy(drive):
    """The rest is written while awake, and may be newer than its copy: what the device holds is current."""
    driven = drive()
    driven.go(None)
    driven.go("ref")
    driven.write_rest(3)
    driven.go("old", strike(driven, "switch", "restore_weights", "old", again=True))
    assert driven.faulted
    driven.recover()
    assert driven.subject.rest["scale"].tolist() == [3.0] * 4


def test_groups_of_a_sync_that_failed_asleep(drive):
    """Groups raised for a sync go down again, also when an engine fails."""
    driven = drive(busy=True)
    driven.go(None)
    driven.sync("ref", "a", trouble=EngineTrouble("end_update"))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("ran", [True, False])
def test_a_load_that_can_not_go_back(drive, number, ran):
    """The device can not be given back what it showed: undone, the load's tag points where it did."""
    driven = drive()
    driven.open_load("old")
    driven.write_load(2)
    driven.check()
    driven.leave_load(fault=strike(driven, "finish_load", "restore_weights", number=number, ran=ran))
    assert not driven.faulted


@pytest.mark.parametrize("then", ["sleep", "begin_training"])
def test_changes_in_several_parts_are_adopted_together_or_not_at_all(drive, then):
    """One part could be adopted, another is some tag's only copy: refused, and no part was."""
    driven = drive(on_untracked="adopt")
    driven.move_tag("old", "actor")  # the frozen part has a copy, the trained one has none
    driven.write_behind("load_state_dict", then)
    driven.check()


def test_an_exchanged_optimizer_state_is_restored(drive):
    """load_state_dict() puts other dictionaries into an optimizer; an aborted phase finds them."""
    driven = drive(distinct=False)
    driven.load_optimizer()
    driven.training(1, seed=0, raises=True)
    assert not driven.subject.optimizer_state()


@pytest.mark.parametrize("anew", [False, True])
def test_an_update_that_was_cut_off_is_no_obstacle(drive, anew):
    """An engine that could not even be told that its update is over takes the next one, also of another controller."""
    driven = drive()
    driven.sync("ref", "a")
    driven.engines["a"].fail_on = {"end_update", "abort_update"}
    driven.sync("actor", "a")
    driven.check()
    if anew:
        driven.shut()
        driven.attach(LifecycleConfig(), "pinned", busy=False)
    driven.sync("actor", "a")
    assert driven.engines["a"].weight_version == driven.actor.tags["actor"]


def test_an_aborted_phase_leaves_no_mixture(drive):
    """After a sleep everything has a copy: weights and optimizer state both go back."""
    driven = drive()
    driven.go(None)
    driven.go("actor")
    driven.training(1, seed=2, raises=True)
    driven.check()
    driven.training(1, seed=3)


def test_a_reader_keeps_what_no_tag_points_at(drive):
    """The copy of a version that its tag has left is not used for anything else under its reader."""
    driven = drive()
    driven.start_reading("ref")
    driven.move_tag("ref", "old")
    driven.check()
    driven.training(1, seed=2)
    driven.go(None)
    driven.check()
    driven.stop_reading()
