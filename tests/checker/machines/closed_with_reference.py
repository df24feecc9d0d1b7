"""The life cycle ends with the reference on the device: the owner saves or trains the wrong model (F027:
https://github.com/THUDM/slime/pull/1903)."""

from tests.checker.machines.variants import model, without_effect

MACHINE = model(without_effect("restore_actor", "close", "SWITCHED"))
INVARIANT = "close_brings_home"
LENGTH = 4
