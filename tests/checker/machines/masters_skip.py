"""Weights are rebuilt from fp32 masters in the optimizer state after a sleep, so that they need no copy of their own; a
"same tag" shortcut skips the rebuild (https://github.com/radixark/miles/pull/3128)."""

from lifecycle.checker.meaning import MEANINGS
from lifecycle.checker.steps import note
from lifecycle.checker.words import ACTOR
from states.resources import Fact
from tests.checker.machines.variants import model, relaxed, with_effects


def _back_up(asked):
    """Masters in host memory are a copy of the actor's weights."""
    yield from MEANINGS["back_up_regions"](asked)
    for slot in asked.words.of.slots:
        yield note([(f"copied.{ACTOR}.{slot}", asked.words("optimizer.copied"))])


def _rebuild(asked):
    """Only for another tag than the one that was there: the shortcut."""
    return () if (asked.tag or ACTOR) == ACTOR else MEANINGS["restore_weights"](asked)


_WAKE = (
    *("check_structure", "agree", "resume_actor_regions", "reload_groups", "restore_rest"),
    *("restore_optimizer", "restore_weights"),
)
MACHINE = model(
    with_effects(_WAKE, "wake_up", "ASLEEP", "RESIDENT", spec=relaxed("restore_optimizer", Fact.VERSION_SHOWN)),
    back_up_regions=_back_up,
    restore_weights=_rebuild,
)
INVARIANT = "contract_holds"
LENGTH = 2
