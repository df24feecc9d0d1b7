"""What a memory backend must do. The controller calls it from the thread that runs the event, one call at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from states.resources import Region, Slot

if TYPE_CHECKING:
    from torch import Tensor

    from lifecycle.hoststore.base import HostBuffer
    from lifecycle.manifest import PartLayout


class MemoryBackend(Protocol):
    """Owns the device bytes of one actor, region by region.

    A region is either resident or paused. ``pause`` of a paused region and ``resume`` of a resident one raise
    ``AssertionError``: the controller's ledger never does it, and some backends would end the process.
    """

    name: str
    keeps_addresses: bool  # whether a region comes back at the addresses it had, as captured graphs need

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

    def pause(self, region: Region) -> int:
        """Give the region's memory back; its contents are lost. Returns the bytes released."""
        ...

    def resume(self, region: Region) -> int:
        """Map the region again, contents undefined until ``copy_in``. Returns the bytes mapped."""
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
        Returns the bytes moved."""
        ...

    def fingerprints(self, slot: Slot, names: Collection[str] | None = None) -> dict[str, str]:
        """Fingerprint of each tensor on the device (``lifecycle.fingerprint``), of all or of the named ones."""
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
