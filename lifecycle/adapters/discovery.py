"""Finding tensors: what modules register, and what else hangs on them. Knows no regions; see ``plain`` for those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from itertools import filterfalse
from typing import Any, NamedTuple

import attrs
from torch import Tensor
from torch.nn import Module

from lifecycle.workspaces.transformer_engine import left_in_place


class Kind(Enum):
    """How a tensor hangs on the model."""

    PARAMETER = auto()
    BUFFER = auto()
    TRANSIENT = auto()  # a buffer that no state dict holds
    ATTRIBUTE = auto()
    EXTRA = auto()  # any of these, declared by the user; adapters say so


_PARAMETER, _ATTRIBUTE = Kind.PARAMETER, Kind.ATTRIBUTE


class Found(NamedTuple):
    """A tensor and the path to it."""

    name: str
    kind: Kind
    tensor: Tensor


#: A module and the prefix of its names, ``""`` for none.
Root = tuple[str, Module]

# What every module has in its __dict__; asked of torch, so that its own additions are not taken for the model's.
_OF_TORCH = frozenset(vars(Module()))


def tensors_of(roots: Iterable[Root]) -> list[Found]:
    """Parameters and buffers under every name they have, then tensors that are plain attributes, in a stable order.

    Attributes are those of modules and of tensors. Containers are followed all the way, dataclass and attrs objects
    one level, and what is reached twice is followed once. Workspaces and recipe state of TransformerEngine's modules
    are not listed: the first are dropped, the second stay in place.
    """
    modules: list[Root] = []
    for prefix, root in roots:
        _list_modules(prefix, root, modules, set())
    found: list[Found] = []
    for path, module in modules:
        _list_registered(path, module, found)
    seen: set[int] = set()
    for item in tuple(found):
        if attributes := vars(item.tensor):
            _visit_fields(item.name, attributes, found, seen)
    for path, module in modules:
        attributes = vars(module)
        for name in filterfalse(_OF_TORCH.__contains__, attributes):
            value = attributes[name]
            if _sort[type(value)] is not _OPAQUE and not left_in_place(module, name, value):
                _visit(_join(path, name), value, found, seen)
    return found


def tensors_in(values: Iterable[tuple[str, Any]]) -> list[Found]:
    """Tensors inside values that are no modules, each under the path given for the value."""
    found: list[Found] = []
    seen: set[int] = set()
    for path, value in values:
        _visit(path, value, found, seen)
    return found


def describe(tensor: Tensor) -> str:
    """Dtype, shape and device, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


# What runs at every event is written for speed: lists that are passed along, since going through a generator for each
# level of modules takes longer, and members of enumerations that are looked up once.


def _list_modules(path: str, module: Module, modules: list[Root], memo: set[Module]) -> None:
    """What ``named_modules(memo, path, remove_duplicate=False)`` yields; called as it calls that of a child."""
    if type(module).named_modules is not Module.named_modules or "named_modules" in vars(module):  # it knows better
        modules.extend(module.named_modules(memo, path, False))
        return
    modules.append((path, module))
    for name, child in module._modules.items():
        if child is not None:
            _list_modules(_join(path, name), child, modules, memo)


def _list_registered(path: str, module: Module, found: list[Found]) -> None:
    # The module's own dictionaries: named_parameters() and named_buffers() take twice as long, and which buffers are in
    # no state dict can be asked nowhere else.
    start = f"{path}." if path else ""
    if parameters := module._parameters:
        for name, parameter in parameters.items():
            if parameter is not None:
                found.append(Found(f"{start}{name}", _PARAMETER, parameter))
    if buffers := module._buffers:
        for name, buffer in buffers.items():
            if buffer is not None:
                kind = Kind.TRANSIENT if name in module._non_persistent_buffers_set else Kind.BUFFER
                found.append(Found(f"{start}{name}", kind, buffer))


class _Sort(Enum):
    OPAQUE = auto()
    TENSOR = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    RECORD = auto()


_OPAQUE, _TENSOR, _MAPPING, _SEQUENCE, _RECORD = _Sort


class _Sorts(dict[type, _Sort]):
    """What to do with a value of a type; a plain dict, since it is asked for every attribute of every module."""

    def __missing__(self, kind: type) -> _Sort:
        self[kind] = sort = _sort_of(kind)
        return sort


_sort = _Sorts()


def _sort_of(kind: type) -> _Sort:
    if issubclass(kind, Tensor):
        return _Sort.TENSOR
    if issubclass(kind, Module):
        return _Sort.OPAQUE
    if issubclass(kind, dict):
        return _Sort.MAPPING
    if issubclass(kind, list | tuple):
        return _Sort.SEQUENCE
    return _Sort.RECORD if attrs.has(kind) or is_dataclass(kind) else _Sort.OPAQUE


def _fields(record: Any) -> dict[str, Any]:
    kind = type(record)
    names = [field.name for field in (attrs.fields(kind) if attrs.has(kind) else fields(kind))]
    return {name: getattr(record, name, None) for name in names}


def _visit_fields(
    path: str, values: Mapping[Any, Any], found: list[Found], seen: set[int], follow: bool = True
) -> None:
    start = f"{path}." if path else ""
    for name, value in values.items():
        sort = _sort[type(value)]
        if sort is _TENSOR and not vars(value):  # the most by far, with nothing to follow
            found.append(Found(f"{start}{name}", _ATTRIBUTE, value))
        elif sort is not _OPAQUE:
            _visit(f"{start}{name}", value, found, seen, follow)


def _visit(path: str, value: Any, found: list[Found], seen: set[int], follow: bool = True) -> None:
    sort = _sort[type(value)]
    if sort is _TENSOR:
        found.append(Found(path, _ATTRIBUTE, value))
    if id(value) in seen or (sort is _RECORD and not follow):
        return
    seen.add(id(value))
    if sort is _TENSOR:
        if attributes := vars(value):
            _visit_fields(path, attributes, found, seen, follow)
    elif sort is _MAPPING:
        _visit_fields(path, value, found, seen, follow)
    elif sort is _SEQUENCE:
        _visit_fields(path, dict(enumerate(value)), found, seen, follow)
    elif sort is _RECORD:
        _visit_fields(path, _fields(value), found, seen, follow=False)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
