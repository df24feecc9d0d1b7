"""Comparing the tensors there are with those that were attached, by what they are and never by their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lifecycle.adapters.discovery import Found, describe


class Attached(NamedTuple):
    """A tensor as it was: ``alias`` keeps its storage, shape and strides."""

    tensor: Tensor
    alias: Tensor
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def now(cls, tensor: Tensor) -> Attached:
        return cls(tensor, tensor.detach(), tensor.dtype, tensor.device)


def missing(these: Iterable[Tensor], those: Iterable[Tensor]) -> list[Tensor]:
    """Those of the first that are no object of the second."""
    known = set(map(id, those))
    return [tensor for tensor in these if id(tensor) not in known]


def same(attached: Mapping[str, Attached], found: Sequence[Found]) -> bool:
    """Whether nothing changed, in order either. Where this says no ``changes`` may still find nothing.

    Asked at every event, about every tensor.
    """
    if len(attached) != len(found):
        return False
    for (name, _, tensor), (was_name, (was, alias, dtype, device)) in zip(found, attached.items(), strict=True):
        if tensor is not was or name != was_name or tensor.dtype is not dtype or tensor.device != device:
            return False
        if not tensor.is_set_to(alias):
            return False
    return True


def changes(attached: Mapping[str, Attached], now: Mapping[str, Tensor]) -> Iterator[str]:
    """What was removed, replaced, tied, untied, cast, moved, reshaped, rebound or added, each with its name."""
    for name, was in attached.items():
        if name not in now:
            yield f"{name}: removed"
        elif told := [*_ties(name, attached, now), *_differences(was, now[name])]:
            yield f"{name}: {', '.join(told)}"
    yield from (f"{name}: added ({describe(now[name])})" for name in now if name not in attached)


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
    shape, comparable = was.alias.shape, tensor is was.tensor
    if tensor.dtype is not was.dtype:
        comparable = False
        yield f"cast from {was.dtype} to {tensor.dtype}"
    if tensor.device != was.device:
        comparable = False
        yield f"moved from {was.device} to {tensor.device}"
    if tensor.shape != shape:
        yield f"reshaped from {tuple(shape)} to {tuple(tensor.shape)}"
    elif comparable and not tensor.is_set_to(was.alias):
        yield "given other bytes or strides (its .data was assigned)"
