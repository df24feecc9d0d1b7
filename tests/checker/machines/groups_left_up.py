"""Groups that were raised for a sync while asleep stay up when it fails: clean-up is on the path of success alone."""

from states.resources import Fact
from tests.checker.machines.variants import model, silent, without_effect

MACHINE = model(without_effect("lower_sync_groups", "fail_sync", spec=silent(Fact.SYNC_GROUPS)))
INVARIANT = "sync_groups_down"
LENGTH = 3
