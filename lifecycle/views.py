"""Reading a part's tensors where its bytes lie, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle.hoststore.base import HostBuffer
from lifecycle.manifest import PartLayout, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_ELEMENT = 16  # bytes, complex128


def views_over(buffer: HostBuffer, layout: PartLayout) -> dict[str, Tensor]:
    """The tensors of a part, as views of its copy: no bytes move.

    Each alias group has a storage of its own: one tensor that is saved must not carry the whole copy along.
    """
    import torch

    reach = {spec.name: _reach(spec, getattr(torch, spec.dtype).itemsize) for spec in layout}
    bounds: dict[int, tuple[int, int]] = {}
    for spec in layout:
        low, high = bounds.get(spec.alias_group, (layout.nbytes, 0))
        start = spec.offset // _LARGEST_ELEMENT * _LARGEST_ELEMENT
        bounds[spec.alias_group] = min(low, start), max(high, spec.offset + reach[spec.name])
    views = {}
    with torch.inference_mode(False):  # written to outside inference mode too
        groups = {
            group: torch.frombuffer(buffer.memory, dtype=torch.uint8, count=high - low, offset=low)
            for group, (low, high) in bounds.items()
            if high > low
        }
        nothing = torch.empty(0, dtype=torch.uint8)
        for spec in layout:
            start = spec.offset - bounds[spec.alias_group][0]
            whole = groups[spec.alias_group][start : start + reach[spec.name]] if spec.nbytes else nothing
            views[spec.name] = whole.view(getattr(torch, spec.dtype)).as_strided(spec.shape, spec.stride)
    return views


def _reach(spec: TensorSpec, size: int) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    steps = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
    return (1 + steps) * size if spec.nbytes else 0
