"""The tensors inside foreign objects, and how many bytes letting go of them gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module

_DEPTH = 4  # a dict of hybrid quantised tensors: dict, tensor, its row-wise half, that half's data


def leaves(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors with bytes of their own inside a value: containers, and quantised tensors that wrap several others.

    What modules hold is theirs, and what a quantizer holds (scales, amax histories) is state: neither is followed.
    """
    if isinstance(value, Tensor) and _storage_bytes(value):
        yield value
    elif depth and not isinstance(value, Module | type):
        for held in _held(value):
            yield from leaves(held, depth - 1)


def nbytes(values: Iterable[object]) -> int:
    """Bytes of the distinct storages of all tensors inside the values."""
    return sum(_sizes(values).values())


def let_go(values: Iterable[object], clear: Callable[[], object]) -> int:
    """Call ``clear``, which drops the values, and return the bytes given back.

    On CUDA the caching allocator says how many that were: what something else still holds is not given back.
    """
    sizes = _sizes(values)
    del values
    on_cpu = sum(size for (device, _), size in sizes.items() if device.type != "cuda")
    return on_cpu + freed({device for device, _ in sizes if device.type == "cuda"}, clear)


def freed(devices: Iterable[torch.device | int], act: Callable[[], object]) -> int:
    """Bytes fewer that torch's caching allocator has handed out on these CUDA devices after ``act``."""
    devices = list(devices)
    before = sum(torch.cuda.memory_allocated(device) for device in devices)
    act()
    return max(0, before - sum(torch.cuda.memory_allocated(device) for device in devices))


def used_devices() -> list[int]:
    """CUDA devices of which torch has memory. Makes no context."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]


def _sizes(values: Iterable[object]) -> dict[tuple[torch.device, int], int]:
    storages = ((tensor.device, tensor.untyped_storage()) for value in values for tensor in leaves(value))
    return {(device, storage.data_ptr()): storage.nbytes() for device, storage in storages}


def _storage_bytes(tensor: Tensor) -> int:
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes() if storage.data_ptr() else 0
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or a wrapper around other tensors
        return 0


def _held(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    attributes = getattr(value, "__dict__", {})
    return [held for name, held in attributes.items() if "quantizer" not in name]
