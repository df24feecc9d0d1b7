"""What still holds memory of a device: tensors of the whole process, told apart from those that an actor owns.

A diagnosis, not a fast path: it looks at every object of the process. What the collector does not see is not named: a
local variable of a running function, what only C++ holds, objects put away by ``gc.freeze()`` (unless a module or
optimizer given by name leads to them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lifecycle.memory.aliases import python_tensors
from lifecycle.memory.base import Holder
from lifecycle.memory.owners import names_of, referrers_of

_NOISE = 1 << 20  # bytes; what remains after rounding, and tells nobody anything
_BLOCK = 512  # bytes; torch's allocator hands out multiples of it
_LOOKED_UP = 8  # holders for which the whole heap is searched, where no module or optimizer has them

Place = tuple[torch.device, int]


def holders(
    device: str,
    owned: Iterable[tuple[int, int]] = (),
    named: Mapping[str, Any] | None = None,
    unmapped: Mapping[int, int] | None = None,
) -> tuple[Holder, ...]:
    """``tensors_outside``, then on CUDA what is no tensor: see ``beside_tensors``."""
    found = tensors_outside(device, owned, named)
    return (*found, *beside_tensors(unmapped or {})) if device == "cuda" else found


def tensors_outside(
    device: str, owned: Iterable[tuple[int, int]], named: Mapping[str, Any] | None = None
) -> tuple[Holder, ...]:
    """Storages on this kind of device that begin outside the owned (address, nbytes) ranges, the largest first.

    Each with the class, shape and dtype of one Python tensor over it, how many there are, and who has it: an attribute
    of one of the ``named`` modules or optimizers (by default of those that the collector knows), or for the largest
    ones whatever refers to them.
    """
    ranges = [(address, address + nbytes) for address, nbytes in owned]
    outside = {
        place: tensors
        for place, tensors in _by_storage(device).items()
        if not any(low <= place[1] < high for low, high in ranges)
    }
    ordered = sorted(outside, key=lambda place: -_nbytes(outside[place]))
    owners = names_of(named) if outside else {}
    told = {place: (_told(outside[place]), _nbytes(outside[place])) for place in ordered}
    nameless = {place: outside[place][0] for place in ordered if place not in owners}
    outside.clear()  # its lists would be found as what refers to the tensors
    searched = {place: nameless[place] for place in list(nameless)[:_LOOKED_UP]}
    nameless.clear()
    owners |= referrers_of(searched)
    return tuple(Holder(f"{what}{_by(owners.get(place))}", nbytes) for place, (what, nbytes) in told.items())


def beside_tensors(unmapped: Mapping[int, int]) -> tuple[Holder, ...]:
    """For each CUDA device: what torch has allocated for nobody in Python, what it caches, and what is not torch's.

    ``unmapped`` has the bytes, by index of the device, that torch counts as its own while they are given back.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    seen = _rounded_bytes()
    return tuple(
        holder
        for index in range(torch.cuda.device_count())
        if torch.cuda.memory_reserved(index)
        for holder in _of_device(index, seen.get(index, 0), unmapped.get(index, 0))
        if holder.nbytes >= _NOISE
    )


def _of_device(index: int, seen: int, unmapped: int) -> Iterable[Holder]:
    allocated, reserved = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
    free, total = torch.cuda.mem_get_info(index)
    where = f"on cuda:{index}"
    yield Holder(
        f"allocated by torch {where} for no tensor of Python: cuBLAS workspaces, autograd, C++", allocated - seen
    )
    yield Holder(f"cached by torch's allocator {where}, used by no tensor", reserved - allocated)
    elsewhere = total - free - (reserved - unmapped)
    yield Holder(f"not torch's {where}: CUDA contexts, libraries such as NCCL, other processes", elsewhere)


def _rounded_bytes() -> dict[int, int]:
    """Bytes of all tensors of Python, as the allocator counts them, by index of the CUDA device."""
    seen: dict[int, int] = {}
    for (device, _), tensors in _by_storage("cuda").items():
        size = -(-_nbytes(tensors) // _BLOCK) * _BLOCK
        seen[device.index or 0] = seen.get(device.index or 0, 0) + size
    return seen


def _by_storage(device: str) -> dict[Place, list[Tensor]]:
    found: dict[Place, list[Tensor]] = {}
    for tensor in python_tensors():
        if tensor.device.type == device and tensor.layout is torch.strided and not tensor.is_meta:
            place = _address(tensor)
            if place:
                found.setdefault((tensor.device, place), []).append(tensor)
    return found


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper or not initialised: has none
        return 0


def _nbytes(tensors: list[Tensor]) -> int:
    return tensors[0].untyped_storage().nbytes()


def _told(tensors: list[Tensor]) -> str:
    first = tensors[0]
    more = f", and {len(tensors) - 1} more over the same storage" if len(tensors) > 1 else ""
    return f"{type(first).__name__} of shape {tuple(first.shape)}, {first.dtype}, on {first.device}{more}"


def _by(owner: str | None) -> str:
    return f": {owner}" if owner else ""
