"""A load writes weights that a restore is still bringing: the rest of the restore comes over what was written.

https://github.com/ROCm/pytorch/issues/3194 is such a race, between a stream that copies and one that goes on."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("arrived", "load"))
INVARIANT = "writers_wait"
LENGTH = 3
