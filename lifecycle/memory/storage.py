"""The backend for accelerators without the memory saver: storages are resized to nothing and back.

Addresses move, so captured graphs do not survive a sleep; tensors, views, ties and gradients do.

For CUDA. On a CPU most operators end the process at a released tensor, where CUDA's raise or fail as kernels: there
this backend is for tests, and ``lifecycle.memory.arena`` for users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import UntypedStorage

from lifecycle.errors import ManifestError
from lifecycle.memory import aliases
from lifecycle.memory.base import Incoming
from lifecycle.memory.device import DeviceBackend
from lifecycle.memory.driver import cached
from lifecycle.memory.moves import BLOCK
from states.resources import Region


class StorageBackend(DeviceBackend):
    """Releases whole storages, each once, with what of them is not named too. Implements ``MemoryBackend``."""

    name = "storage"
    keeps_addresses = False

    def __init__(self, device: str = "cuda", poison: int | None = None) -> None:
        super().__init__(device, poison)
        self._released: dict[Region, list[tuple[UntypedStorage, int]]] = {}  # with their sizes in bytes

    def complete(self) -> None:
        """Nothing but the storages of what was adopted is released."""

    def begin_resume(self, region: Region) -> None:
        """torch's allocator takes memory with a lock on everything that the caller would do meanwhile."""

    def begin_copy_in(self, block: Sequence[Incoming]) -> None:
        """There is no resume that was begun."""

    def cancel_resume(self) -> None:
        """Nothing was begun."""

    def _place(self, region: Region, groups: Sequence[aliases.AliasGroup]) -> None:
        """Pausing releases the storages that the tensors have; ManifestError for those that can not be resized."""
        fixed = [", ".join(group.tensors) for group in groups if group.nbytes and _is_fixed(group.storage)]
        if fixed:
            advice = "Clone the tensors: their storage is shared with another process, or over memory not torch's own."
            raise ManifestError("storages that can not be resized", fixed, advice)

    def _release(self, region: Region) -> None:
        self._released[region] = self._sizes(region)
        self._let_go([storage for storage, _ in self._released[region]])

    def _take_back(self, region: Region) -> None:
        """In the order of the part, so that small neighbours are likely to be neighbours again."""
        taken: list[UntypedStorage] = []
        try:
            for storage, nbytes in self._released[region]:
                taken.append(storage)
                storage.resize_(nbytes)
        except BaseException as error:
            self._let_go(taken)
            if isinstance(error, RuntimeError) and _tells_of_no_room(error):
                needed = sum(nbytes for _, nbytes in self._released[region])
                raise MemoryError(f"no room for region {region}: {needed} bytes needed. {error}") from error
            raise
        del self._released[region]

    def _needed(self, region: Region) -> Mapping[int, int]:
        needed: Counter[int] = Counter()
        for storage, nbytes in self._released.get(region) or self._sizes(region):
            needed[storage.device.index or 0] += -(-nbytes // BLOCK) * BLOCK
        return needed

    def _free_bytes(self, index: int) -> int:
        """With what torch's allocator has in whole segments: it gives them back when asked for more."""
        return super()._free_bytes(index) + (cached(index) if self.device == "cuda" else 0)

    def _sizes(self, region: Region) -> list[tuple[UntypedStorage, int]]:
        found = sorted(self._placed_in(region), key=lambda one: one.offset)
        storages = [one.memory.untyped_storage() for one in found]
        return [(storage, storage.nbytes()) for storage in storages]

    def _let_go(self, storages: Sequence[UntypedStorage]) -> None:
        for storage in storages:
            storage.resize_(0)
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _is_fixed(storage: UntypedStorage) -> bool:
    # A CPU storage that was shared says it is resizable, and ends the process when it is resized back.
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


def _tells_of_no_room(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
