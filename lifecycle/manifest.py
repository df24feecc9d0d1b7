"""What the actor owns: every tensor with its region, slot, dtype, shape, stride, alias group and place in its part.

Pure values, no torch: discovery is the adapters' work (``lifecycle/adapters``), the bytes are the memory backends'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import field, frozen

from states.resources import Region, Slot


@frozen
class TensorSpec:
    """One named tensor inside the bytes of its part.

    ``dtype`` is torch's name without the prefix (``"bfloat16"``), ``stride`` counts elements, ``offset`` counts bytes
    from the start of the part to the tensor's first element. Tensors of one ``alias_group`` share a storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    alias_group: int
    nbytes: int  # logical bytes: number of elements times the element's size


@frozen
class PartLayout:
    """How the bytes of one slot's part are laid out, on the device and in every copy. Appended to, never reordered."""

    slot: Slot
    region: Region
    nbytes: int
    tensors: tuple[TensorSpec, ...] = field(factory=tuple)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)


@frozen
class Manifest:
    """The layouts of all slots that own bytes."""

    layouts: Mapping[Slot, PartLayout]

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())
