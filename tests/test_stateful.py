"""The whole controller against a dictionary of tensors, by random sequences of events."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from lifecycle.testing.stateful import LifecycleMachine

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

    settings = settings(COMMON, max_examples=100, stateful_step_count=40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestLifecycleAtLength(LifecycleMachine.TestCase):
    """More and longer ones, different every time."""

    settings = settings(COMMON, max_examples=1000, stateful_step_count=50)
