"""Waking to the tag that was active before skips the restore: after a sleep that discarded the memory, parameters are
whatever was mapped (https://github.com/radixark/miles/pull/3128, rejected optimisation)."""

from lifecycle.checker.meaning import MEANINGS
from lifecycle.checker.words import ACTOR
from tests.checker.machines.variants import model


def _restore_weights(asked):
    if asked.event == "wake_up" and (asked.tag or ACTOR) == ACTOR:
        return ()
    return MEANINGS["restore_weights"](asked)


MACHINE = model(restore_weights=_restore_weights)
INVARIANT = "effect_needs_met"  # the optimizer state belongs to weights that are not there
LENGTH = 2
