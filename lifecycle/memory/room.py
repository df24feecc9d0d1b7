"""Whether a device has room for what is about to be mapped there."""

from __future__ import annotations

import torch

from lifecycle.errors import TransitionRefused

MARGIN = 32 << 20  # bytes that must stay free beside what is mapped: page tables, and what a driver takes unasked


class NoRoom(TransitionRefused, MemoryError):
    """Too little free memory; nothing was mapped. ``needed`` and ``free`` are bytes on ``device`` (its index)."""

    def __init__(self, event: str, state: str, device: int, needed: int, free: int) -> None:
        self.device, self.needed, self.free = device, needed, free
        reason = f"{needed} bytes and a margin of {MARGIN} are needed on cuda:{device}, {free} are free"
        advice = "Other processes or other pools hold the rest: release it there, then ask again."
        super().__init__(event, state, (), reason, advice)


def require_room(event: str, state: str, needed: dict[int, int]) -> None:
    """Raise NoRoom where a device has too little, also after torch has given back what it only keeps."""
    for device, nbytes in needed.items():
        if _free(device) < nbytes + MARGIN:
            torch.cuda.empty_cache()
            if (free := _free(device)) < nbytes + MARGIN:
                raise NoRoom(event, state, device, nbytes, free)


def _free(device: int) -> int:
    return int(torch.cuda.mem_get_info(device)[0])
