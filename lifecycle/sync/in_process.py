"""For engines in the actor's own process: they read the leased tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class InProcessTransport:
    """Name to tensor view, on whatever device the source is; valid until the sync ends, read-only by contract."""

    _tensors: Mapping[str, Tensor]
    name: str = "in_process"
    needs_host_copy: bool = False

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors
