"""'actor' is pointed at the reference while asleep: what training made is referenced by nobody any more."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("not_actor", "tag", "ASLEEP"))
INVARIANT = "tags_move_between_versions"
LENGTH = 2
