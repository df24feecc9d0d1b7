"""Weights are copied in before their memory is mapped (F102: https://github.com/vllm-project/vllm/issues/57853)."""

from states.resources import Fact
from tests.checker.machines.variants import model, relaxed, with_effects

_WAKE = (
    *("check_structure", "agree", "restore_weights", "resume_actor_regions", "reload_groups", "restore_rest"),
    "restore_optimizer",
)
MACHINE = model(
    with_effects(_WAKE, "wake_up", "ASLEEP", "RESIDENT", spec=relaxed("restore_weights", Fact.WEIGHTS, Fact.REST_VALID))
)
INVARIANT = "readable_source"
LENGTH = 2
