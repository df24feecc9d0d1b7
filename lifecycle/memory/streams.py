"""Streams and events of the CUDA devices that copies touch; for tensors on a CPU everything here does nothing.

A copy starts behind the caller's current stream and the device's default stream: what was launched on either before has
then read, or written, what it meant to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from lifecycle.fingerprint import Started
from states.resources import Slot

Checked = tuple[Slot, Started | None]

# Priorities: copies that are waited for go before others of the process. Fingerprints do not go before a forward: as
# its equals they take the processors that its kernels leave idle.
_PRIORITY = {"check": 0}
_HIGH = -1


class OwnStreams:
    """A backend's own streams: one per device and purpose, made when first needed."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, str], Stream] = {}

    def get(self, device: torch.device, purpose: str) -> Stream | None:
        """None where the device has no streams."""
        if device.type != "cuda":
            return None
        if (device, purpose) not in self._made:
            self._made[device, purpose] = torch.cuda.Stream(device, priority=_PRIORITY.get(purpose, _HIGH))  # type: ignore[no-untyped-call]
        return self._made[device, purpose]


class Lanes:
    """The two streams per device of an exchange: the bytes that leave go on one, those that come on the other."""

    def __init__(self, devices: Iterable[torch.device], own: OwnStreams) -> None:
        self._out = {device: own.get(device, "out") for device in devices}
        self._into = {device: own.get(device, "into") for device in devices}

    def follow(self) -> None:
        """Start behind what the current and the default streams hold now."""
        for stream in (*self._out.values(), *self._into.values()):
            follow(stream)

    def out(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, the current stream of the device is the one on which bytes leave."""
        return on(self._out[device])

    def into(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, it is the one on which bytes come; what comes waits for what has been told to leave."""
        out, into = self._out[device], self._into[device]
        if out is not None and into is not None:
            into.wait_stream(out)
        return on(into)

    def wait(self) -> None:
        """Return when everything on these streams has ended. Raises what the device reports (RuntimeError)."""
        for stream in (*self._out.values(), *self._into.values()):
            if stream is not None:
                stream.record_event().synchronize()


class Flight:
    """Copies under way on streams, and the fingerprints behind them. Implements ``Arrival``.

    ``hosts`` are the tensors that are copied from: their memory must stay mapped until the copies have ended. ``check``
    starts the fingerprints by slot: called where somebody waits, if it was not called before.
    """

    def __init__(
        self, events: Mapping[torch.device, Event], check: Callable[[], Sequence[Checked]], hosts: Sequence[Tensor]
    ) -> None:
        self._events, self._check, self._hosts = dict(events), check, tuple(hosts)
        self._started: Sequence[Checked] | None = None

    def start_check(self) -> None:
        """Enqueue the fingerprints now, behind the copies."""
        self._started = self._check()

    def order(self) -> None:
        """As ``Arrival`` says, for the current stream of each device."""
        order(self._events)

    def wait(self) -> Mapping[Slot, Mapping[str, str]]:
        if self._started is None:
            wait(self._events)  # ahead of the fingerprints, which nobody wants of copies that have failed
            self.start_check()
        assert self._started is not None
        found: dict[Slot, dict[str, str]] = {slot: {} for slot, _ in self._started}
        for slot, started in self._started:
            found[slot] |= started.read() if started is not None else {}
        wait(self._events)  # where nothing was to be read
        self._hosts = ()
        return found

    def ended(self) -> bool:
        """Whether everything is there, without waiting. Raises what the device reports (RuntimeError)."""
        return all(event.query() for event in self._events.values())  # type: ignore[no-untyped-call]


def follow(stream: Stream | None) -> None:
    """Let the stream's further work wait for what its device's current and default streams hold now."""
    if stream is None:
        return
    current, default = torch.cuda.current_stream(stream.device), torch.cuda.default_stream(stream.device)
    for before in (current,) if current == default else (current, default):
        if before != stream:
            stream.wait_stream(before)


def follow_default(devices: Iterable[torch.device]) -> None:
    """Let the current stream of each device wait for what its default stream holds now."""
    for device in devices:
        follow(torch.cuda.current_stream(device) if device.type == "cuda" else None)


def on(stream: Stream | None) -> AbstractContextManager[object]:
    """Inside, it is the current stream of its device."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def on_default(devices: Iterable[torch.device]) -> Iterator[None]:
    """Inside, the current stream of each device is its default one."""
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(on(torch.cuda.default_stream(device) if device.type == "cuda" else None))
        yield


@contextmanager
def complete(devices: Sequence[torch.device]) -> Iterator[None]:
    """What is enqueued inside on the current streams starts behind the default streams; on leaving it has ended.

    Also when the inside raises: the memory that was copied to or from may be given back then.
    """
    follow_default(devices)
    try:
        yield
    finally:
        wait(marks(devices))


@contextmanager
def ended_on_error(devices: Sequence[torch.device]) -> Iterator[None]:
    """Where the inside raises, what it had enqueued on the current streams has ended."""
    try:
        yield
    except BaseException:
        wait(marks(devices))
        raise


def order(events: Mapping[torch.device, Event]) -> None:
    """What is launched on the current stream of each device from here on comes behind its event."""
    for device, event in events.items():
        torch.cuda.current_stream(device).wait_event(event)


def wait(events: Mapping[torch.device, Event]) -> None:
    """Return when they have happened. Raises what the device reports (RuntimeError)."""
    for event in events.values():
        event.synchronize()


def marks(devices: Iterable[torch.device]) -> dict[torch.device, Event]:
    """An event per CUDA device, behind everything on its current stream."""
    return {device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"}


def settle(devices: Iterable[torch.device]) -> None:
    """Return when nothing at all runs on these devices any more, on any stream."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
