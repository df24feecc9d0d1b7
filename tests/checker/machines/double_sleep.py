"""A second sleep pauses again: the process ends in C++ (F097: https://github.com/THUDM/slime/issues/1895)."""

from lifecycle.checker.formula import TRUE
from lifecycle.checker.meaning_memory import REGIONS, pause_region
from tests.checker.machines.variants import model, with_effects


def _pause(asked):
    for region in REGIONS:
        yield from pause_region(asked.words, region, TRUE if asked.shown is None else asked.words(region))


_AGAIN = ("settle_writers", "agree", "collect_memory", "pause_regions")
MACHINE = model(with_effects(_AGAIN, "sleep", "ASLEEP"), pause_regions=_pause)
INVARIANT = "alternation"
LENGTH = 2
