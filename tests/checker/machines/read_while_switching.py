"""Another set of weights is copied over what a reader still reads (F129: a source must not vanish)."""

from tests.checker.machines.variants import model, without_guard

MACHINE = model(without_guard("no_device_reader", "switch"))
INVARIANT = "reader_undisturbed"
LENGTH = 4
