"""torch's cuBLAS workspaces: one for each pair of handle and stream, up to 32 MiB each on Hopper."""

from __future__ import annotations

import torch

from lifecycle.workspaces.tensors import freed, used_devices


class TorchCublas:
    """torch does not say how many there are, so they are dropped along with others, measured by the allocator.

    The next matrix product allocates its workspace again; its contents are scratch.
    """

    name = "torch: cuBLAS workspaces"

    def nbytes(self) -> int:
        return 0

    def drop(self) -> int:
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        return freed(devices, clear) if clear is not None and (devices := used_devices()) else 0
