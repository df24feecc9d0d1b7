"""From what an engine tells of itself to the facts of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from states.rollout import EngineFact


def facts_told(status: Mapping[str, Any]) -> frozenset[EngineFact]:
    """The resource facts that are true by this answer of ``RolloutEngine.status``."""
    pools = {pool: told["state"] != "released" for pool, told in status["pools"].items()}
    requests = status["requests"]
    true = {
        EngineFact.WEIGHTS_IN: pools["weights"],
        EngineFact.KV_IN: pools["kv_cache"],
        EngineFact.PAUSED: status["paused"] is not None,
        EngineFact.RECEIVING: status["update"] is not None,
        EngineFact.VERSION_HELD: status["weight_version"] is not None,
        EngineFact.REQUESTS: requests["running"] + requests["waiting"] > 0,
    }
    return frozenset(fact for fact, holds in true.items() if holds)
