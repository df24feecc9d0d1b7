"""All regions are paused at once, also where one is paused already: torch_memory_saver's ``pause()`` without a tag ends
the process then."""

from lifecycle.checker.formula import TRUE
from lifecycle.checker.meaning_memory import REGIONS, pause_region
from tests.checker.machines.variants import model


def _pause(asked):
    for region in REGIONS:
        yield from pause_region(asked.words, region, TRUE)


MACHINE = model(pause_regions=_pause)
INVARIANT = "alternation"
LENGTH = 3
