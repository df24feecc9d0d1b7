"""What is asked of the world: actions, the call that they belong to, and what may be asked without changing anything.

Pure values; ``lifecycle.work`` makes the actions, ``lifecycle.world`` does them, and ``lifecycle.outcome`` says what is
true then.
"""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from lifecycle.versions import Facts
from states.resources import Region, Slot
from states.spec import Effect


@frozen
class Action:
    """One thing to do. ``nbytes`` is what it moves each way, at most; ``direction`` is None where no bytes move.

    ``into``: the part that comes in where ``part`` goes out. ``late``: it has only begun when it is done; bytes are
    waited for by an "arrive" of their own, and what a "verify" finds by the "copy_out" that follows. ``streamed``: they
    come block by block, once "start_stream" is done. ``own`` is set where the machine's owner does it: an effect that
    this library does not know.
    """

    do: str
    slot: Slot | None = None
    part: int | None = None
    region: Region | None = None
    engine: str | None = None
    tag: str | None = None
    nbytes: int = 0
    direction: str | None = None
    into: int | None = None
    late: bool = False
    streamed: bool = False
    own: Effect | None = None

    @property
    def moved_bytes(self) -> int:
        """Over the link, both ways together."""
        return self.nbytes * {None: 0, BOTH: 2}.get(self.direction, 1)


OUT, IN, BOTH = "device_to_host", "host_to_device", "both"


class Probe(Protocol):
    """What can be asked of the world without changing it."""

    def nbytes(self, slot: Slot) -> int: ...
    def region_bytes(self, region: Region) -> int: ...
    def grad_bytes(self) -> int: ...
    def workspace_bytes(self) -> int: ...
    def graphs_captured(self) -> bool: ...
    def has_groups(self) -> bool: ...
    def groups_up(self) -> bool: ...
    def has_optimizer(self) -> bool: ...
    def optimizer_appeared(self) -> bool: ...
    def keeps_addresses(self) -> bool: ...
    def stream_ordered(self) -> bool: ...
    def can_stream(self) -> bool: ...
    def overlaps(self) -> bool: ...
    def dropped(self) -> bool: ...
    def available_bytes(self) -> int | None: ...
    def mapped(self) -> frozenset[Region]: ...
    def installed(self) -> bool: ...


@frozen
class Call:
    """One asking for an event: its arguments, and what was true when it began."""

    event: str
    before: Facts
    shown: str | None = None  # the tag that the source state shows
    tag: str | None = None
    of: str | None = None
    implicit: bool = False
    engines: tuple[str, ...] = ()
    host_copy: bool = False  # some engine reads host memory only
    rotate: tuple[tuple[str, str], ...] = ()
    keep: frozenset[Region] = field(default=frozenset())
    verify: bool = True
    restore_aborted: bool = True
    stream: bool = False  # a wake that returns when the first block's bytes are there
    force: bool = False  # a close that gives up weights that can not be brought back
