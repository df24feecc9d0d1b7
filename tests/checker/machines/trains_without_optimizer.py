"""A wake brings the weights back and not the optimizer state, and training begins all the same (F111:
https://github.com/NovaSky-AI/SkyRL/pull/1991)."""

from states.resources import Fact
from tests.checker.machines.variants import model, relaxed, silent, without_effect

_RELAXED = relaxed("await_optimizer", Fact.OPTIMIZER_VALID, spec=relaxed("open_phase", Fact.OPTIMIZER_VALID))
_SPEC = silent(Fact.OPTIMIZER_VALID, states=("RESIDENT",), spec=_RELAXED)
MACHINE = model(without_effect("restore_optimizer", "wake_up", spec=_SPEC))
INVARIANT = "training_on_the_actor"
LENGTH = 4
