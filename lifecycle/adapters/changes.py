"""Comparing the tensors there are with those that were attached, by what they are and never by their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from lifecycle.adapters.discovery import describe


class Attached(NamedTuple):
    """A tensor as it was: ``alias`` keeps its storage, dtype, device, shape and strides."""

    tensor: Tensor
    alias: Tensor

    @classmethod
    def now(cls, tensor: Tensor) -> Attached:
        return cls(tensor, tensor.detach())


def missing(these: Iterable[Tensor], those: Iterable[Tensor]) -> list[Tensor]:
    """Those of the first that are no object of the second."""
    known = set(map(id, those))
    return [tensor for tensor in these if id(tensor) not in known]


def changes(attached: Mapping[str, Attached], now: Mapping[str, Tensor]) -> Iterator[str]:
    """What was removed, replaced, tied, untied, cast, moved, reshaped, rebound or added, each with its name."""
    for name, was in attached.items():
        if name not in now:
            yield f"{name}: removed"
        elif not _intact(was, now[name]):
            yield f"{name}: {', '.join((*_ties(name, attached, now), *_differences(was, now[name])))}"
    yield from (f"{name}: added ({describe(now[name])})" for name in now if name not in attached)


def _intact(was: Attached, tensor: Tensor) -> bool:
    alias = was.alias
    same = tensor is was.tensor and tensor.dtype is alias.dtype and tensor.device == alias.device
    return same and tensor.is_set_to(alias)


def _ties(name: str, attached: Mapping[str, Attached], now: Mapping[str, Tensor]) -> Iterator[str]:
    """How the object under a name changed, said in terms of the other names that had it or have it."""
    if now[name] is attached[name].tensor:
        return
    before = {other for other, was in attached.items() if was.tensor is attached[name].tensor and other != name}
    after = {other for other, tensor in now.items() if tensor is now[name] and other != name}
    yield from (f"untied from {other}" for other in sorted(before - after))
    yield from (f"tied to {other}" for other in sorted(after - before))
    yield "replaced by another tensor"


def _differences(was: Attached, tensor: Tensor) -> Iterator[str]:
    alias = was.alias
    if tensor.dtype is not alias.dtype:
        yield f"cast from {alias.dtype} to {tensor.dtype}"
    if tensor.device != alias.device:
        yield f"moved from {alias.device} to {tensor.device}"
    if tensor.shape != alias.shape:
        yield f"reshaped from {tuple(alias.shape)} to {tuple(tensor.shape)}"
    elif tensor is was.tensor and tensor.dtype is alias.dtype and tensor.device == alias.device:
        yield "given other bytes or strides (its .data was assigned)"
