"""What a host store must do: give out buffers for copies of parts. Which part is in which is not its business."""

from __future__ import annotations

from mmap import mmap
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from states.resources import Copy

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class HostBuffer:
    """One buffer: ``nbytes`` usable bytes at the start of ``memory``; ``fd`` is set where another process may map it.

    ``locked``: its pages are registered with CUDA, so copies run at the link's speed and may be asynchronous.

    The ``mmap`` is never closed by hand (a tensor over it would then read unmapped memory); it goes with its last user.
    """

    id: int
    nbytes: int
    memory: mmap
    fd: int | None
    locked: bool = False


class HostStore(Protocol):
    """Allocates and frees buffers. Never re-uses one: that is ``lifecycle.hoststore.pool``'s work."""

    name: str
    copy: Copy  # HOST or DISK: what a part in such a buffer counts as
    shared: bool  # whether its buffers have a descriptor that another process may map

    def allocate(self, nbytes: int) -> HostBuffer:
        """A zeroed buffer whose every byte is really reserved, so that writing it can not fail later.

        Raises OSError or MemoryError when there is no room; nothing is kept then.
        """
        ...

    def free(self, buffer: HostBuffer) -> None:
        """Give the buffer's bytes back, also while another process still has it mapped (it keeps its mapping)."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What was fallen back to so far, why, and what to do about it."""
        ...

    def close(self) -> None:
        """Free every buffer that is left."""
        ...


def tensor_over(buffer: HostBuffer) -> Tensor:
    """The buffer's bytes as uint8 of shape (nbytes,), sharing its memory and keeping it mapped."""
    import torch

    with torch.inference_mode(False):  # written to outside inference mode too
        return torch.frombuffer(buffer.memory, dtype=torch.uint8)[: buffer.nbytes]
