"""What can be asked of one actor's memory, adapter and hooks without changing anything (``work.Probe``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle.adapters.base import Adapter
from lifecycle.errors import ManifestError
from lifecycle.memory.base import MemoryBackend
from lifecycle.outcome import Settings
from states.resources import SLOT_REGION, Region, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Looking:
    """The asking half of ``lifecycle.world.World``."""

    adapter: Adapter
    backend: MemoryBackend
    _slots: tuple[Slot, ...]
    _optimizer: dict[str, Tensor]  # the state tensors that the backend owns
    _settings: Settings
    _dropped: bool

    def nbytes(self, slot: Slot) -> int:
        return self.backend.layout(slot).nbytes if slot in self._slots else 0

    def region_bytes(self, region: Region) -> int:
        return sum(self.nbytes(slot) for slot in self._slots if SLOT_REGION[slot] is region)

    def grad_bytes(self) -> int:
        return self.adapter.grad_bytes()

    def workspace_bytes(self) -> int:
        return self.adapter.workspace_bytes()

    def graphs_captured(self) -> bool:
        return self.adapter.graphs_captured()

    def has_groups(self) -> bool:
        return self.adapter.has_groups()

    def groups_up(self) -> bool:
        return self.adapter.groups_up()

    def has_optimizer(self) -> bool:
        return self.adapter.has_optimizer()

    def optimizer_appeared(self) -> bool:
        """Whether optimizer state exists that the backend does not own, or is gone that it does."""
        if not (self.adapter.has_optimizer() or self._optimizer) or Region.OPTIMIZER not in self.backend.resident():
            return False
        try:
            now = self.adapter.optimizer_tensors()
        except ManifestError:
            return True  # something is wrong with it: the structure's check says what, or else the adoption
        known = self._optimizer
        return len(now) != len(known) or any(known.get(owned.name) is not owned.tensor for owned in now)

    def keeps_addresses(self) -> bool:
        return self.backend.keeps_addresses

    def stream_ordered(self) -> bool:
        return self.backend.stream_ordered

    def can_stream(self) -> bool:
        """Whether hooks would wait for each block of a streamed wake. A captured graph replays without any hook."""
        return bool(self.adapter.blocks()) and not self.graphs_captured()

    def overlaps(self) -> bool:
        return self.backend.overlaps

    def dropped(self) -> bool:
        """Whether something was dropped since memory was last collected, that cycles may hold."""
        return self._dropped

    def available_bytes(self) -> int | None:
        return self.backend.available()

    def mapped(self) -> frozenset[Region]:
        return self.backend.resident()

    def installed(self) -> bool:
        return self.adapter.installed()

    def settings(self) -> Settings:
        return self._settings
