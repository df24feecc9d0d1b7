"""After a failure every way out asks for the flag that only the normal way clears (F141:
https://github.com/vllm-project/vllm/pull/39212)."""

from attrs import evolve

from states.actor import ACTOR
from tests.checker.machines.variants import model, rows_changed


def _quiet(row):
    return evolve(row, guards=(*row.guards, "no_load"))


MACHINE = model(rows_changed(rows_changed(ACTOR, _quiet, "recover"), _quiet, "close", "FAULTED"))
INVARIANT = "way_home"
LENGTH = 2
