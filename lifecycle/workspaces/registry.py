"""Droppers: what a sleep may throw away because the next use makes it again, and how many bytes that gave back.

A *workspace* is a pure function of weights and inputs: after it was dropped, the next forward has the same bits. What
is not (an amax history, a random mask, a key-value cache) is no workspace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from attrs import frozen

from lifecycle.errors import LifecycleError


class Dropper(Protocol):
    """Knows one kind of workspace. Called from the event's thread, never under captured graphs."""

    @property
    def name(self) -> str: ...

    def nbytes(self) -> int:
        """Bytes that ``drop`` would give back now; cheap, changes nothing. 0 also where they can not be known:
        such a workspace is dropped when another one is, but is no reason to drop."""
        ...

    def drop(self) -> int:
        """Drop it. Returns the bytes given back."""
        ...


@frozen
class Workspace:
    """A dropper made of two functions."""

    name: str
    nbytes: Callable[[], int]
    drop: Callable[[], int]


@frozen
class Dropped:
    """What became of one dropper: bytes given back, seconds, and the error where it failed."""

    name: str
    nbytes: int
    seconds: float
    failure: str = ""


class WorkspacesLeft(LifecycleError):
    """Droppers failed; the others were heard. ``failures`` has each one's error by its name."""

    def __init__(self, doing: str, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        told = "; ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failures.items())
        advice = "Take a dropper of your own off with lifecycle.workspaces.unregister(), or attach without it."
        super().__init__(f"{doing} failed for {told}. {advice}")


_registered: list[Dropper] = []


def register(dropper: Dropper) -> Dropper:
    """Let every actor of this process drop this too, from its next sleep on. Held until ``unregister``.

    Raises TypeError for what is no dropper, ValueError for a name that is registered.
    """
    name = getattr(dropper, "name", None)
    lacks = [method for method in ("nbytes", "drop") if not callable(getattr(dropper, method, None))]
    if not isinstance(name, str) or lacks:
        raise TypeError(f"{dropper!r} is no dropper: it needs a name (text) and the methods nbytes() and drop()")
    if any(other.name == name for other in _registered):
        raise ValueError(f"a dropper named {name!r} is registered: unregister() it first, or choose another name")
    _registered.append(dropper)
    return dropper


def unregister(dropper: Dropper) -> None:
    """Raises ValueError when it is not registered."""
    if not any(other is dropper for other in _registered):
        raise ValueError(f"dropper {getattr(dropper, 'name', dropper)!r} is not registered")
    _registered[:] = [other for other in _registered if other is not dropper]


class Workspaces:
    """One actor's droppers, then those registered for all. ``report`` says what the last ``drop`` did, one by one."""

    def __init__(self, own: Iterable[Dropper] = (), everyone: bool = True) -> None:
        self._own = tuple(own)
        self._everyone = everyone
        self.report: tuple[Dropped, ...] = ()

    @property
    def droppers(self) -> tuple[Dropper, ...]:
        return (*self._own, *(_registered if self._everyone else ()))

    def nbytes(self) -> int:
        """Bytes that ``drop`` would give back, as far as they are known. Raises WorkspacesLeft."""
        known, failures = 0, {}
        for dropper in self.droppers:
            try:
                known += dropper.nbytes()
            except Exception as error:
                failures[dropper.name] = error
        if failures:
            raise WorkspacesLeft("asking for workspaces", failures)
        return known

    def drop(self) -> int:
        """Drop all of them and return the bytes given back.

        Raises WorkspacesLeft after the last one, with every one that failed; the report has those that did not.
        """
        _wait_for_kernels()
        report, failures = [], {}
        for dropper in self.droppers:
            began, given, failure = time.perf_counter(), 0, ""
            try:
                given = int(dropper.drop())
            except Exception as error:
                failures[dropper.name] = error
                failure = f"{type(error).__name__}: {error}"
            report.append(Dropped(dropper.name, given, time.perf_counter() - began, failure))
        self.report = tuple(report)
        if failures:
            raise WorkspacesLeft("dropping workspaces", failures)
        return sum(one.nbytes for one in report)


def _wait_for_kernels() -> None:
    """A workspace may be read on another stream than it was allocated on, where its memory would be given away."""
    import torch

    from lifecycle.workspaces.tensors import used_devices

    for device in used_devices():
        torch.cuda.synchronize(device)
