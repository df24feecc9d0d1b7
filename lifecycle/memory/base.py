"""What a memory backend must do. The controller calls it from the thread that runs the event, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from states.resources import Region, Slot

if TYPE_CHECKING:
    from torch import Tensor

    from lifecycle.hoststore.base import HostBuffer
    from lifecycle.manifest import PartLayout


@frozen(eq=False)
class Incoming:
    """Bytes that are to come from a copy: those of the named tensors of a slot, or the first ``nbytes`` of all of it.

    ``names`` has every tensor of an alias group or none of it. The tensors in ``check`` are fingerprinted on arrival.
    """

    slot: Slot
    buffer: HostBuffer
    nbytes: int
    names: frozenset[str] | None = None
    check: tuple[str, ...] = ()


@frozen(eq=False)
class Holder:
    """Something that holds device memory: what it is, in words, and how many bytes."""

    what: str
    nbytes: int


class Arrival(Protocol):
    """Bytes on their way to the device."""

    def order(self) -> None:
        """Let everything launched on the caller's current stream from here on see the bytes. Does not wait."""
        ...

    def wait(self) -> Mapping[Slot, Mapping[str, str]]:
        """Return when they are there: the fingerprints of what was to be checked, by slot and name.

        May be called again. Raises what the copy raised (RuntimeError from the device).
        """
        ...


class MemoryBackend(Protocol):
    """Owns the device bytes of one actor, region by region.

    A region is either resident or paused. ``pause`` of a paused region and ``resume`` of a resident one raise
    ``AssertionError``: the controller's ledger never does it, and some backends would end the process.
    """

    name: str
    keeps_addresses: bool  # whether a region comes back at the addresses it had, as captured graphs need
    stream_ordered: bool  # whether ``start_copy_in`` returns before the bytes are there
    overlaps: bool  # whether ``exchange`` moves both ways at once, and ``start_fingerprints`` returns before it is done

    def adopt(self, slot: Slot, region: Region, tensors: Mapping[str, Tensor]) -> PartLayout:
        """Take over the bytes of these tensors, appended to the slot's layout, and return the whole new layout.

        The tensor objects stay the same (``id``, ``requires_grad``, views and ties among them); their values too.
        Only while the region is resident. Raises ManifestError when storage is shared with a tensor not named here.
        """
        ...

    def forget(self, slot: Slot) -> None:
        """Drop the slot's layout and let go of its tensors, which keep their memory and values."""
        ...

    def layout(self, slot: Slot) -> PartLayout: ...

    def check(self) -> None:
        """Raise ManifestError when a tensor was moved away, so that its values are not the slot's bytes."""
        ...

    def complete(self) -> None:
        """Every slot has been adopted. Raises ManifestError naming what else lies in memory that a pause releases."""
        ...

    def pause(self, region: Region) -> int:
        """Give the region's memory back; its contents are lost. Returns the bytes released.

        What is in flight to or from it, and what earlier launches still read, has ended before.
        """
        ...

    def resume(self, region: Region) -> int:
        """Map the region again, contents undefined until ``copy_in``. Returns the bytes mapped."""
        ...

    def begin_resume(self, region: Region) -> None:
        """The caller will soon resume this paused region, or cancel that: what can be had of it meanwhile is.

        The region counts as paused until then. Raises nothing: what stands in the way, ``resume`` says.
        """
        ...

    def begin_copy_in(self, block: Sequence[Incoming]) -> None:
        """Behind a resume that was begun, this block will be the first of a ``start_copy_in``, ``aside``.

        Its bytes may start as soon as there is memory for them. Raises nothing, as ``begin_resume``.
        """
        ...

    def cancel_resume(self) -> None:
        """No region that was begun with will be resumed after all, and nothing is copied there."""
        ...

    def resident(self) -> frozenset[Region]:
        """The regions that are mapped now, as the backend itself knows it (read back by ``recover``)."""
        ...

    def copy_out(self, slot: Slot, buffer: HostBuffer) -> int:
        """Copy the slot's bytes to the start of the buffer; complete on return. Returns the bytes moved."""
        ...

    def copy_in(self, slot: Slot, buffer: HostBuffer, nbytes: int) -> int:
        """Overwrite the first ``nbytes`` of the slot from the buffer and bump autograd's version counters of every
        tensor of the slot (https://pytorch.org/docs/stable/autograd.html#in-place-operations-with-autograd).
        Complete on return. Returns the bytes moved."""
        ...

    def start_copy_in(self, blocks: Sequence[Sequence[Incoming]], aside: bool) -> tuple[Arrival, ...]:
        """Begin to bring blocks back, in this order, each as ``copy_in`` would; an arrival for each.

        On the caller's current stream, behind what is there; ``aside``: on a stream of the backend's own, behind what
        the caller's stream holds now, so that later launches run beside it. Buffers must not be written to, nor given
        back, until the arrivals have been waited for. A backend without streams has copied everything on return.
        """
        ...

    def exchange(self, slot: Slot, out: HostBuffer, into: HostBuffer, nbytes: int) -> int:
        """Copy the slot's bytes to ``out`` and overwrite the first ``nbytes`` of it from ``into``; complete on return.

        Chunk by chunk and, where the backend ``overlaps``, both ways at once; version counters as in ``copy_in``.
        Stopped half-way by an exception, the old bytes are those already in ``out`` and what is still on the device:
        ``finish_exchange`` puts them together. Returns the bytes moved each way.
        """
        ...

    def finish_exchange(self, slot: Slot, out: HostBuffer) -> int:
        """After an exchange that stopped: complete its ``out`` with what is still on the device. Returns the bytes.

        Where none is under way everything still is, and is copied out. May be called again if it raised.
        """
        ...

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        """Fingerprint of each tensor on the device (``lifecycle.fingerprint``), of all or of the named ones."""
        ...

    def start_fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> Callable[[], Mapping[str, str]]:
        """The same, beside what is launched from here on that only reads them; what is returned waits, and tells."""
        ...

    def views(self, slot: Slot) -> dict[str, Tensor]:
        """The device tensors by name, detached."""
        ...

    def collect(self) -> int:
        """Return freed memory to the system, as far as it can be known in bytes (0 where it can not)."""
        ...

    def available(self) -> int | None:
        """Bytes that ``resume`` could map now, or None where the backend can not tell."""
        ...

    def held(self) -> dict[Region, int]:
        """Bytes mapped now, per region."""
        ...

    def holders(self) -> tuple[Holder, ...]:
        """What still holds memory of the device beside resident regions, largest first; looks at the whole process."""
        ...
