"""Somebody else's sleep is taken inside a block that was promised to stay awake."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("no_scope", "sleep"))
INVARIANT = "scope_stays_awake"
LENGTH = 1
