"""Shared memory: the engine maps the host copies and reads them by itself. Nothing is copied on the sender's side."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen


@frozen
class Segment:
    """One host buffer another process may map: ``fd`` is open in the sender, ``nbytes`` are readable from its start.

    The ``id`` stays with the memory as long as the buffer lives, so that an engine may keep its mapping. It is a hint:
    an engine also compares what the descriptor refers to, and drops mappings that the newest update does not name.
    """

    id: int
    fd: int
    nbytes: int


def _as_tuple(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(segments)


@frozen
class SharedMemoryTransport:
    """The segments of one update. The sender holds a lease on them until the update has ended or was aborted."""

    name = "shared_memory"
    needs_host_copy = True

    segments: tuple[Segment, ...] = field(converter=_as_tuple)
