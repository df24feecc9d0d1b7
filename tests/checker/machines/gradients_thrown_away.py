"""A sleep between two halves of a gradient accumulation discards the gradients (F021:
https://github.com/NovaSky-AI/SkyRL/pull/2008)."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("no_backward_left", "sleep"))
INVARIANT = "gradients_kept"
LENGTH = 2
