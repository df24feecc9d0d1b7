"""What optimizers step and keep, under the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lifecycle.adapters.discovery import Found, Kind, describe, tensors_in
from lifecycle.errors import ManifestError

#: By the prefix of their names: ``""`` where there is one, else ``0.``, ``1.``, …
Optimizers = Mapping[str, Optimizer]


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """What it steps, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def title_of(prefix: str) -> str:
    """How messages call the optimizer with this prefix."""
    return f"optimizer {prefix.rstrip('.')}".rstrip()


def state_of(optimizers: Optimizers, found: Iterable[Found]) -> list[Found]:
    """Tensors in their state and among their hyperparameters. ``found`` has the model's parameters.

    Raises ManifestError when there is state of a parameter that the model does not have.
    """
    return tensors_in([*_entries(optimizers, found), *_hyperparameters(optimizers)])


def _entries(optimizers: Optimizers, found: Iterable[Found]) -> Iterator[tuple[str, Any]]:
    names: dict[int, str] = {}  # tied ones under the first of theirs
    for name, kind, tensor in found:
        if kind is Kind.PARAMETER:
            names.setdefault(id(tensor), name)
    for prefix, optimizer in optimizers.items():
        for key, entry in optimizer.state.items():
            if not isinstance(key, Tensor):
                yield f"{prefix}{key}", entry
            elif id(key) in names:
                yield f"{prefix}{names[id(key)]}", entry
            else:
                what = f"{title_of(prefix)} keeps state of a parameter that is not the model's"
                raise ManifestError(what, [describe(key)])


def _hyperparameters(optimizers: Optimizers) -> Iterator[tuple[str, Any]]:
    for prefix, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{prefix}param_groups.{index}.{key}", value
