"""Memory is mapped without a look at what is free: the process ends (https://github.com/sgl-project/sglang/issues/14092)."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("memory_free", "wake_up"))
INVARIANT = "memory_checked"
LENGTH = 2
