"""Which tensors share bytes, how those bytes are laid out in a part, and how tensors are moved onto other memory.

An *alias group* is the named tensors of one storage: ties and views among them survive a move because the whole group
moves together, as the one byte extent that its tensors cover.

[Note: bases] A view keeps the tensor that it was made from alive (``Tensor._base``), even where no Python name is left
for it: every tensor of a safetensors file is such a view. So the bases of named tensors belong to the group without
being named. They are moved along; left behind, they would hold the old storage, and all its memory, for ever.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from attrs import evolve, frozen
from torch import Tensor, UntypedStorage

from lifecycle.errors import ManifestError
from lifecycle.manifest import PartLayout, TensorSpec

ALIGNMENT = 64  # bytes; what torch's own CPU allocator gives, so that kernels take the same paths
ELEMENT_ALIGNMENT = 16  # bytes of the largest element, complex128


@frozen(eq=False)
class AliasGroup:
    """The named tensors of one storage, their bases, and the extent of its bytes that they cover. See [Note: bases].

    ``start`` counts bytes from the start of the storage and is a multiple of every element's size, so that each
    tensor's distance from it is a whole number of elements. ``nbytes`` is 0 for tensors without elements.
    """

    tensors: Mapping[str, Tensor]
    bases: tuple[Tensor, ...]
    start: int
    nbytes: int

    @property
    def members(self) -> tuple[Tensor, ...]:
        return (*self.tensors.values(), *self.bases)

    @property
    def storage(self) -> UntypedStorage:
        return next(iter(self.tensors.values())).untyped_storage()

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.start

    def offset(self, tensor: Tensor) -> int:
        """Bytes from the start of the extent to the tensor's first element."""
        return int(tensor.storage_offset()) * tensor.itemsize - self.start if tensor.numel() else 0


def alias_groups(tensors: Mapping[str, Tensor]) -> tuple[AliasGroup, ...]:
    """The alias groups of strided CPU or accelerator tensors, in order of first appearance.

    Raises ManifestError, naming the tensors, when two storages overlap in memory: moving them would tear them apart.
    """
    by_storage: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, {})[name] = tensor
    groups = tuple(_group(members) for members in by_storage.values())
    placed = sorted((group for group in groups if group.nbytes), key=lambda group: group.address)
    torn = [
        f"{_names(low)} and {_names(high)}"
        for low, high in pairwise(placed)
        if low.address + low.nbytes > high.address and _device(low) == _device(high)
    ]
    if torn:
        raise ManifestError("tensors share memory through different storages", torn, "Make one a view of the other.")
    return groups


def offsets(groups: Sequence[AliasGroup]) -> tuple[int, ...]:
    """Where each group starts, in bytes, when they are laid out aligned one after the other; last, where they end."""
    return tuple(accumulate((-(-group.nbytes // ALIGNMENT) * ALIGNMENT for group in groups), initial=0))


def extended(layout: PartLayout, groups: Sequence[AliasGroup], places: Sequence[int] | None = None) -> PartLayout:
    """The layout with these groups appended, at ``places`` behind its end; last of them, where they end.

    Where no places are given, they are ``offsets``. Tensors are in the order of the groups, whatever the places.
    """
    first_group = max((spec.alias_group for spec in layout), default=-1) + 1
    places = offsets(groups) if places is None else places
    added = (
        _spec(name, tensor, layout.nbytes + place + group.offset(tensor), number)
        for number, (group, place) in enumerate(zip(groups, places, strict=False), first_group)
        for name, tensor in group.tensors.items()
    )
    return evolve(layout, nbytes=layout.nbytes + places[-1], tensors=(*layout.tensors, *added))


def extent(group: AliasGroup) -> Tensor:
    """The group's bytes as uint8 of shape (nbytes,), where they are."""
    return over(group.storage, torch.uint8, group.start, (group.nbytes,), (1,))


def over(
    storage: UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A tensor over the storage whose first element lies ``offset`` bytes from its start."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(stride))


def rebind(groups: Iterable[AliasGroup], storages: Iterable[UntypedStorage]) -> None:
    """Put every tensor of each group onto the group's new storage, at its old distance from the start of the extent.

    The tensor objects, their flags, dtypes, shapes and strides stay. All of them or none: when one can not be rebound,
    those already done are put back and the error is raised.
    """
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for group, storage in zip(groups, storages, strict=True):
            for tensor, offset in [(member, group.offset(member)) for member in group.members]:
                done.append((tensor, tensor.data))
                tensor.data = over(storage, tensor.dtype, offset, tensor.shape, tensor.stride())
    except BaseException:
        for tensor, data in reversed(done):
            tensor.data = data
        raise


def refuse_unmovable(tensors: Mapping[str, Tensor], device: str) -> None:
    """Raise ManifestError naming every tensor that can not be moved by its bytes alone."""
    problems = [f"{name} ({problem})" for name, tensor in tensors.items() for problem in _problems(tensor, device)]
    if problems:
        raise ManifestError("tensors that can not be taken over", problems)


def refuse_owned(groups: Iterable[AliasGroup], owns: Callable[[AliasGroup], bool]) -> None:
    """Raise ManifestError naming the groups with bytes that some actor owns: two must not move the same bytes."""
    owned = [", ".join(group.tensors) for group in groups if group.nbytes and owns(group)]
    if owned:
        raise ManifestError("tensors already belong to an actor", owned, "Close that actor first.")


def refuse_outsiders(groups: Sequence[AliasGroup]) -> None:
    """Raise ManifestError when a Python tensor outside the groups shares a storage with one of them.

    It would go on showing the old bytes. What only C++ holds can not be seen.
    """
    shared = _outsiders(groups)
    if shared:
        gc.collect()  # one in a reference cycle that nobody has is no reason to refuse
        shared = _outsiders(groups)
    if shared:
        raise ManifestError(
            "storage is shared with tensors that were not named", shared, "Drop them, clone them, or name them too."
        )


def _outsiders(groups: Sequence[AliasGroup]) -> list[str]:
    known = {id(tensor) for group in groups for tensor in group.members}
    by_storage = {group.storage._cdata: group for group in groups if group.nbytes}
    return [
        f"{_names(by_storage[place])} with an unnamed {type(tensor).__name__} of shape {tuple(tensor.shape)}, "
        f"{tensor.dtype}"
        for tensor in python_tensors()
        if id(tensor) not in known and (place := _storage_of(tensor)) in by_storage
    ]


def _group(members: Mapping[str, Tensor]) -> AliasGroup:
    unnamed = tuple(_bases(members.values()))
    extents = [_covered(tensor) for tensor in (*members.values(), *unnamed) if tensor.numel()]
    low = min((first for first, _ in extents), default=0) // ELEMENT_ALIGNMENT * ELEMENT_ALIGNMENT
    return AliasGroup(members, unnamed, low, max((end for _, end in extents), default=low) - low)


def _bases(named: Collection[Tensor]) -> Iterator[Tensor]:
    """The bases, each once, that are not named themselves and that still share their view's storage."""
    seen = {id(tensor) for tensor in named}
    for tensor in named:
        base = tensor._base
        if base is not None and id(base) not in seen and _storage_of(base) == _storage_of(tensor):
            seen.add(id(base))
            yield base


def _covered(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of the bytes of a tensor with elements, in its storage."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize


def _spec(name: str, tensor: Tensor, offset: int, group: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.stride(), offset, group, tensor.nbytes)


def _problems(tensor: Tensor, device: str) -> Iterator[str]:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        yield f"of class {type(tensor).__name__}, not a plain tensor"
    elif tensor.layout is not torch.strided:
        yield f"of layout {tensor.layout}, not strided"
    elif tensor.is_quantized:
        yield f"quantised, {tensor.dtype}"
    elif tensor.device.type != device:
        yield f"on {tensor.device}, not on {device}"
    elif tensor.is_inference():
        yield "an inference tensor: make it outside torch.inference_mode(), or clone it"
    elif tensor.is_conj() or tensor.is_neg():
        yield "lazily conjugated or negated: resolve it first"
    elif tensor.numel() and _covered(tensor)[1] > tensor.untyped_storage().nbytes():
        yield f"its storage was released: {tensor.untyped_storage().nbytes()} bytes are left"


def python_tensors() -> Iterator[Tensor]:
    """Every tensor of the process that Python's collector knows, of any subclass."""
    # By type, not isinstance: that would run __class__ properties of lazy proxies. Few types, many objects.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return (found for found in objects if type(found) in kinds)


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, wrapped or not yet initialised: has none
        return None


def _names(group: AliasGroup) -> str:
    return ", ".join(group.tensors)


def _device(group: AliasGroup) -> torch.device:
    return group.storage.device
