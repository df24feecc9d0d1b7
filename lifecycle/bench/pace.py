"""How fast the core runs on which something is timed.

On a machine that others share, a core runs half as fast while somebody's work is on its other half, for seconds: of the
same memory a pause took 4.8 to 5.9 ms, and 8.3 in the one round where a fixed piece of work took 1.93 times its best
(``docs/benchmarks/h200/memory.json``). So that is measured beside what is timed, and told with it.
"""

from __future__ import annotations

import time

from attrs import define

_ADDITIONS = 20_000  # half a millisecond


def work() -> float:
    """Seconds that a fixed piece of work takes here and now."""
    began = time.perf_counter()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return time.perf_counter() - began


@define
class Pace:
    """``best``: the fewest seconds that the work has taken, once it has been measured."""

    best: float = float("inf")

    def now(self) -> float:
        """How long it takes now, times the best so far."""
        took = work()
        self.best = min(self.best, took)
        return took / self.best
