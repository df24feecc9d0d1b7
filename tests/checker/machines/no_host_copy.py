"""No host copy is kept where only the offload would need it: a sleep with one version in use copies nothing out, and
the pause asks nobody (https://github.com/radixark/miles/pull/3128)."""

from lifecycle.checker.steps import note
from states.resources import Fact
from tests.checker.machines.variants import model, relaxed


def _copy_out(asked):
    w = asked.words
    for slot in w.of.slots:  # "backups are on" only where a second model is kept
        yield note(w.copy_device(slot), when=~w.same("actor", "ref", slot))


MACHINE = model(relaxed("pause_regions", Fact.VERSIONS_COPIED), copy_out_weights=_copy_out)
INVARIANT = "version_has_copy"
LENGTH = 1
