"""The life cycle ends with the reference on the device: the owner saves or trains the wrong model (F027:
https://github.com/THUDM/slime/pull/1903)."""

from states.resources import Fact
from tests.checker.machines.variants import model, relaxed, without_effect

MACHINE = model(
    without_effect("restore_actor", "close", "SWITCHED", spec=relaxed("restore_optimizer", Fact.VERSION_SHOWN))
)
INVARIANT = "close_brings_home"
LENGTH = 4
