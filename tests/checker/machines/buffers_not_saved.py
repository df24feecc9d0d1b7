"""Non-persistent buffers are dropped with the rest and come back as garbage (F001:
https://github.com/vllm-project/vllm/pull/16889)."""

from lifecycle.checker.steps import note
from states.resources import Fact
from tests.checker.machines.variants import model, relaxed


def _back_up(asked):
    yield note(asked.words.let(True, "optimizer.copied"), when=asked.words("optimizer.valid"))


MACHINE = model(relaxed("pause_regions", Fact.BACKUPS_COPIED), back_up_regions=_back_up)
INVARIANT = "version_has_copy"
LENGTH = 1
