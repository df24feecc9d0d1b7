"""A core that nobody else slows down, to begin on with what is timed.

On a machine that others share, a core runs half as fast while somebody's work is on its other half: on one H200's
machine a pause of the same memory took 4.3 ms on a core by itself and 7.5 ms beside others', and so did everything else
that a processor does. That lasts for seconds, and hides what was to be compared.
"""

from __future__ import annotations

import os
import time

from attrs import define, field

_ADDITIONS = 20_000  # half a millisecond
_NEAR = 1.15  # times the shortest that the same work has taken


def pace() -> float:
    """Seconds that a fixed piece of work takes on the core that this thread is on."""
    began = time.perf_counter()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return time.perf_counter() - began


def allowed() -> list[int]:
    """The cores that this thread may run on; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@define
class Cores:
    """Those that this thread may run on, and the shortest ``pace`` that any of them had, in seconds."""

    numbers: list[int] = field(factory=allowed)
    best: float = field(factory=pace)

    def choose(self) -> float:
        """Have this thread run on a core that is at its best, the one that it is on if that is one, or what comes
        nearest. Returns its ``pace``, times ``best``.

        It is free to leave it again, as the system likes it: threads that it starts would be bound with it.
        """
        try:
            return self._choose() / self.best
        finally:
            if self.numbers:
                os.sched_setaffinity(0, self.numbers)

    def _choose(self) -> float:
        found = self._pace()
        paces: dict[int, float] = {}
        for number in self.numbers:
            if found <= _NEAR * self.best:
                return found
            found = paces[number] = self._pace_on(number)
        if paces and found > _NEAR * self.best:
            found = self._pace_on(min(paces, key=paces.__getitem__))
        return found

    def _pace_on(self, number: int) -> float:
        os.sched_setaffinity(0, {number})
        return self._pace()

    def _pace(self) -> float:
        found = pace()
        self.best = min(self.best, found)
        return found
