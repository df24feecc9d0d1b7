"""All of an optimizer's state but the tensors that a memory backend owns: what a restore puts back beside their bytes.

[Note: host state] Beside parameters on an accelerator optimizers keep small tensors in host memory: the ``step`` of
torch's Adam, where it is neither fused nor capturable. No sleep has to release them, so no backend owns them; their
values belong to the content all the same, and are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

Skeleton = dict[Any, Any]  # what was in an optimizer's state


@frozen(eq=False)
class _Kept:
    """A tensor in host memory, and a copy of its value."""

    tensor: Tensor
    value: Tensor


def beside_accelerator(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors in host memory stay where they are, see [Note: host state]: some of these are elsewhere."""
    return not all(tensor.is_cpu for tensor in tensors)


def kept(state: Skeleton, host: bool) -> Skeleton:
    """The state, containers anew and what is in them as it is; with ``host`` the values of tensors on the CPU too."""

    def leaf(value: Any) -> Any:
        on_host = host and isinstance(value, Tensor) and value.device.type == "cpu"
        return _Kept(value, value.detach().clone()) if on_host else value

    copied: Skeleton = _mapped(dict(state), leaf)
    return copied


def put_back(value: Any) -> Any:
    """What ``kept`` was given: containers anew, the same tensors in them, those on the host with their values."""
    return _mapped(value, _with_value)


def _with_value(value: Any) -> Any:
    if not isinstance(value, _Kept):
        return value
    with torch.no_grad():
        value.tensor.copy_(value.value)
    return value.tensor


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Dictionaries, lists and tuples anew, all the way down; ``leaf`` says what becomes of what is in them."""
    if isinstance(value, dict):
        return {key: _mapped(held, leaf) for key, held in value.items()}
    return type(value)(_mapped(one, leaf) for one in value) if type(value) in (list, tuple) else leaf(value)
