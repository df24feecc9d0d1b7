"""Gradients are left, another tag is shown, and the sleep from there asks nobody (F021's kind)."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("no_backward_left", "sleep", "SWITCHED"))
INVARIANT = "gradients_kept"
LENGTH = 3
