"""The whole controller against a dictionary of tensors, by random sequences of events."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

from lifecycle.testing.stateful import LifecycleMachine

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.fixture(autouse=True)
def _few_objects():
    """Attaching looks through all objects for tensors; those of the test session are out of its sight."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class TestLifecycle(LifecycleMachine.TestCase):
    """The same sequences every time."""

    settings = settings(COMMON, max_examples=60, stateful_step_count=30, derandomize=True)


@pytest.mark.slow
class TestLifecycleAtLength(LifecycleMachine.TestCase):
    """Longer ones, and other ones every time."""

    settings = settings(COMMON, max_examples=1000, stateful_step_count=50)
