"""What is live is published, whatever tag it is: after the reference was shown, rollouts are the reference's (F026:
https://github.com/THUDM/slime/pull/2224)."""

from lifecycle.checker.formula import TRUE
from lifecycle.checker.steps import note
from lifecycle.checker.words import ACTOR, LENT
from tests.checker.machines.variants import model


def _lease_source(asked):
    w = asked.words
    if asked.shown is not None:
        reads = [(f"lent.device.{slot}", TRUE) for slot in w.of.slots]
        yield note(w.point(LENT, asked.tag or ACTOR), reads, w.let(True, "leased"))
    else:
        yield note(w.point(LENT, asked.tag or ACTOR), w.let(True, "leased"))


MACHINE = model(lease_source=_lease_source)
INVARIANT = "lease_stays_readable"
LENGTH = 4
