"""A training phase opens while another tag's weights are shown (F029: https://github.com/vllm-project/vime/pull/53)."""

from attrs import evolve

from states.actor import ACTOR
from states.resources import Fact
from states.spec import SAME, Row
from tests.checker.machines.variants import model, relaxed, rows_changed, silent

_BEGIN = ACTOR.row("begin_training", "RESIDENT")


def _quiet(row):
    return evolve(row, guards=(*(name for name in row.guards if name != "no_phase"), "no_phase"))


_SPEC = relaxed("open_phase", Fact.OPTIMIZER_VALID)
for _event in ("sleep", "switch", "load", "finish_load", "abort_load", "adopt", "start_sync", "close"):
    _SPEC = rows_changed(_SPEC, _quiet, _event, "SWITCHED")
_SPEC = silent(Fact.WORKING, states=("SWITCHED",), spec=_SPEC)
_REFUSED = tuple(
    (state, tuple(event for event in events if (state, event) != ("SWITCHED", "begin_training")))
    for state, events in _SPEC.refused
)
_ROW = Row("begin_training", "SWITCHED", SAME, _BEGIN.effects, _BEGIN.guards)

MACHINE = model(evolve(_SPEC, refused=_REFUSED, rows=(*_SPEC.rows, _ROW)))
INVARIANT = "contract_holds"
LENGTH = 2
