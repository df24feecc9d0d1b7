"""The copies of a block to the device: what they take, and how they start; the first ones ahead, in another thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import torch
from attrs import frozen
from torch import Tensor
from torch.cuda import Event, Stream

from lifecycle.fingerprint import Prepared
from lifecycle.memory import moves, streams
from lifecycle.memory.base import Incoming
from states.resources import Region

Marks = dict[torch.device, Event]


@frozen(eq=False)
class Launch:
    """What one ``Incoming`` takes, all of it made ready."""

    incoming: Incoming
    runs: tuple[moves.Run, ...]
    host: Tensor
    touched: tuple[Tensor, ...]
    prepared: Prepared | None


@frozen(eq=False)
class Ahead:
    """A block of one region whose copies start in another thread.

    ``told`` is what comes behind them on their streams, once they have been enqueued.
    """

    region: Region
    launches: tuple[Launch, ...]
    told: Future[Marks]

    def flight(self) -> streams.Flight | None:
        """The copies, when they have been enqueued; None where they could not be."""
        if self.told.exception() is not None:
            return None
        return streams.Flight(self.told.result(), lambda: (), [one.host for one in self.launches])

    def of(self, block: Iterable[Launch]) -> Marks | None:
        """The end of the copies, if they are those of this block; otherwise returns when there are none any more."""
        if self.told.exception() is not None:
            return None
        if _asked(self.launches) == _asked(block):
            return self.told.result()
        streams.wait(self.told.result())
        return None


def enqueue(block: Iterable[Launch], devices: Sequence[torch.device]) -> Marks:
    """Copies on the current streams of their devices, and what comes behind them there."""
    for launch in block:
        moves.copy_in(launch.runs, launch.host, launch.incoming.nbytes)
    return streams.marks(devices)


def fly(block: Sequence[Launch], arrived: Marks, checking: Sequence[Stream | None]) -> streams.Flight:
    """Copies that were enqueued; their fingerprints now, on the current streams, or later on those of ``checking``."""

    def check() -> list[streams.Checked]:
        with ExitStack() as stack:
            for stream in checking:
                stack.enter_context(streams.on(stream))
            streams.order(arrived)
            return [(one.incoming.slot, one.prepared.start() if one.prepared else None) for one in block]

    flight = streams.Flight(arrived, check, [one.host for one in block])
    if not any(checking):
        flight.start_check()
    return flight


def bump(tensors: Iterable[Tensor]) -> None:
    """Let autograd know that these were overwritten: before the copies, so that none can end without."""
    torch.autograd.graph.increment_version(list(tensors))


def _asked(block: Iterable[Launch]) -> frozenset[tuple[object, ...]]:
    asked = (one.incoming for one in block)
    return frozenset((one.slot, id(one.buffer), one.nbytes, one.names) for one in asked)
