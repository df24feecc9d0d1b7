"""Optimizer state is released without a copy, as where the offload walks the wrong list (F074:
https://github.com/modelscope/ms-swift/pull/7821)."""

from lifecycle.checker.steps import note
from states.resources import Fact
from tests.checker.machines.variants import model, relaxed


def _back_up(asked):
    yield note(asked.words.let(True, "rest.copied"), when=asked.words("rest.valid"))


MACHINE = model(relaxed("pause_regions", Fact.BACKUPS_COPIED), back_up_regions=_back_up)
INVARIANT = "version_has_copy"
LENGTH = 1
