"""Rotating tags after a sync copies the actor's tensors instead of moving a reference; asleep they can not be read."""

from lifecycle.checker.meaning import MEANINGS
from lifecycle.checker.steps import Micro, Way
from lifecycle.checker.words import ACTOR
from tests.checker.machines.variants import model


def _rotate(asked):
    if asked.rotate:
        w = asked.words
        copied = Way(tuple(pair for slot in w.of.slots for pair in w.copy_device(slot)))
        yield Micro((copied,), sound=w.shows(ACTOR) & w("weights"), breaks="readable_source")
        yield from MEANINGS["rotate_tags"](asked)


MACHINE = model(rotate_tags=_rotate)
INVARIANT = "readable_source"
LENGTH = 3
