"""What still holds memory of a device: tensors of the whole process, told apart from those that an actor owns."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from lifecycle.memory.base import Holder


def tensors_outside(device: str, owned: Iterable[tuple[int, int]]) -> tuple[Holder, ...]:
    """Storages on this kind of device that begin outside the owned (address, nbytes) ranges, the largest first.

    Each with the class, shape and dtype of one Python tensor over it, and a note of how many there are.
    """
    ranges = [(address, address + nbytes) for address, nbytes in owned]
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in _python_tensors():
        if tensor.device.type == device and tensor.layout is torch.strided and not tensor.is_meta:
            place = tensor.untyped_storage().data_ptr()
            if place and not any(low <= place < high for low, high in ranges):
                by_storage.setdefault(place, []).append(tensor)
    found = [Holder(_told(tensors), tensors[0].untyped_storage().nbytes()) for tensors in by_storage.values()]
    return tuple(sorted(found, key=lambda holder: -holder.nbytes))


def _told(tensors: list[Tensor]) -> str:
    first = tensors[0]
    more = f", and {len(tensors) - 1} more over the same storage" if len(tensors) > 1 else ""
    return f"{type(first).__name__} of shape {tuple(first.shape)}, {first.dtype}, on {first.device}{more}"


def _python_tensors() -> list[Tensor]:
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [found for found in objects if type(found) in kinds and not _wrapped(found)]


def _wrapped(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper or not initialised: has none
        return True
    return False
