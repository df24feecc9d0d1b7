"""The sync's source is chosen from tag and placement alone: asleep, 'actor' is still the active tag, so it is read from
the device, which holds nothing (https://github.com/radixark/miles/pull/3128)."""

from lifecycle.checker.formula import FALSE, TRUE
from lifecycle.checker.steps import note
from lifecycle.checker.words import ACTOR, LENT
from tests.checker.machines.variants import model


def _lease_source(asked):
    w, tag = asked.words, asked.tag or ACTOR
    active = asked.shown or ACTOR  # asleep the tag is what it was
    reads = [(f"lent.device.{slot}", TRUE if tag == active else FALSE) for slot in w.of.slots]
    yield note(w.point(LENT, tag), reads, w.let(True, "leased"))


MACHINE = model(lease_source=_lease_source)
INVARIANT = "lease_stays_readable"
LENGTH = 2
