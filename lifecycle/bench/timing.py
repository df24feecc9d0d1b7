"""Wall-clock times of things done to a device that is idle before and after, several of them in turns."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import asdict, define, evolve, field, frozen

from lifecycle.bench.pace import Pace


@frozen
class Took:
    """Seconds of one call: until it ``returned``, and until the device had ``done`` what it was told to do.

    ``pace``: how long a fixed piece of work took just before, times the best of the run; see ``lifecycle.bench.pace``.
    """

    returned: float
    done: float
    pace: float = 1.0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@frozen
class Times:
    """The rounds of one thing, in the order they were run."""

    rounds: tuple[Took, ...]

    @property
    def done(self) -> float:
        """Median seconds until the device was done."""
        return statistics.median(took.done for took in self.rounds)

    @property
    def returned(self) -> float:
        """Median seconds until the call returned."""
        return statistics.median(took.returned for took in self.rounds)

    def to_plain(self) -> dict[str, Any]:
        return {"median": self.done, "median_returned": self.returned, "rounds": [t.to_plain() for t in self.rounds]}


@frozen(eq=False)
class Turn:
    """Something to time: its ``steps`` by name, one after the other, each by itself.

    ``before`` runs ahead of the first step and ``each`` after every one of them, told its name, outside the timed
    region. ``once``: so slow that one round suffices. ``at_once``: steps that come right behind the one before, without
    the rest that is between others.
    """

    steps: Mapping[str, Callable[[], object]]
    before: Callable[[], object] = lambda: None
    each: Callable[[str], object] = lambda name: None
    once: bool = False
    at_once: Container[str] = ()


def idle() -> None:
    """Wait until every device has done what it was told to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> Took:
    idle()
    began = time.perf_counter()
    call()
    returned = time.perf_counter()
    idle()
    return Took(returned - began, time.perf_counter() - began)


def in_turns(turns: Mapping[str, Turn], rounds: int, rest: float = 0.0) -> dict[str, dict[str, Times]]:
    """Time every step of each of them ``rounds`` times, by their names; every round begins with another one.

    Before each step the device is idle for ``rest`` seconds, which are not timed. Minutes lie between a sleep and a
    wake in use. Behind one another, the wake's copy would share the copy engines with the driver, which clears in the
    background what the sleep gave back: ``scrubSubmitPages``, called by ``pmaFreePages``, in
    https://github.com/NVIDIA/open-gpu-kernel-modules. ``lifecycle bench pieces`` measures both. Behind the rest the
    core's pace is measured.
    """
    took: dict[str, dict[str, list[Took]]] = {name: {step: [] for step in turn.steps} for name, turn in turns.items()}
    names, pace = list(turns), Pace()
    with _no_collections():
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if number == 0 or not turns[name].once:
                    _take(turns[name], took[name], rest, pace)
    return {name: {step: Times(tuple(found)) for step, found in steps.items()} for name, steps in took.items()}


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python's garbage collector does not run by itself, as in ``timeit``: it takes 0.1 s here, whoever it meets."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _take(turn: Turn, took: Mapping[str, list[Took]], rest: float, pace: Pace) -> None:
    turn.before()
    for step, run in turn.steps.items():
        if rest and step not in turn.at_once:
            idle()
            time.sleep(rest)
            now = pace.now()
            took[step].append(evolve(timed(run), pace=now))
        else:
            took[step].append(timed(run))
        turn.each(step)


@define
class Peak:
    """The most device memory that was taken beside what was taken before, in bytes.

    ``allocated``: by torch's allocator. ``driver``: as the driver saw it, sampled each millisecond, so a shorter peak
    may be missed. Both 0 without CUDA.
    """

    allocated: int = 0
    driver: int = 0
    _least_free: int = field(default=0, init=False)

    def to_plain(self) -> dict[str, int]:
        return {"allocated": self.allocated, "driver": self.driver}


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """What is done inside is slower for being watched: time it in other rounds."""
    peak = Peak()
    if not torch.cuda.is_available():
        yield peak
        return
    idle()
    torch.cuda.reset_peak_memory_stats()
    held, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    peak._least_free = free
    ended = threading.Event()
    device = torch.cuda.current_device()
    watcher = threading.Thread(target=_watch, args=(peak, ended, device), daemon=True)
    watcher.start()
    try:
        yield peak
        idle()
    finally:
        ended.set()
        watcher.join()
    peak.allocated = max(0, torch.cuda.max_memory_allocated() - held)
    peak.driver = max(0, free - peak._least_free)


def _watch(peak: Peak, ended: threading.Event, device: int) -> None:
    while not ended.wait(0.001):
        peak._least_free = min(peak._least_free, torch.cuda.mem_get_info(device)[0])
