"""The copy is skipped though the declaration still says that it is made: the pause, which relies on it, must notice."""

from tests.checker.machines.variants import model

MACHINE = model(copy_out_weights=lambda asked: ())
INVARIANT = "effect_needs_met"
LENGTH = 1
