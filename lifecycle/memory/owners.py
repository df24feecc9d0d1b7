"""Who has a tensor, in words: attributes of modules, state of optimizers, else whatever refers to it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lifecycle.workspaces.tensors import leaves

Place = tuple[torch.device, int]  # a storage: its device and address

_DEPTH = 3  # a dict of hybrid quantised tensors holds its data so deep; what hangs on modules can be very wide
_KINDS = {"_parameters": "parameter", "_buffers": "buffer"}


def names_of(named: Mapping[str, Any] | None = None) -> dict[Place, str]:
    """Who has which storage, among these modules and optimizers; by default among all that the collector knows."""
    roots = _roots() if named is None else named
    owners: dict[Place, str] = {}
    for name, root in roots.items():
        if isinstance(root, Module):
            for place, owner in _of_module(name, root):
                owners.setdefault(place, owner)
    for root in roots.values():
        if isinstance(root, Optimizer):
            for place, owner in _of_optimizer(root, dict(owners)):
                owners.setdefault(place, owner)
    return owners


def referrers_of(wanted: Mapping[Place, Tensor]) -> dict[Place, str]:
    """What refers to these tensors, where the collector knows: attributes, containers, closures, frames of the past.

    Passes over all objects, twice. The mapping must be the only thing of the caller's that has the tensors.
    """
    if not wanted:
        return {}
    tensors = {id(tensor): place for place, tensor in wanted.items()}
    found = dict(_global_variables(tensors))
    referrers = [one for one in gc.get_referrers(*wanted.values()) if one is not wanted and not _is_ours(one)]
    owners = _owners_of_dicts([one for one in referrers if type(one) is dict])
    for one in referrers:
        for held in gc.get_referents(one):
            if (place := tensors.get(id(held))) is not None:
                found.setdefault(place, _describe(one, held, owners))
    return found


def _roots() -> dict[str, Any]:
    """Modules that are no child of another, and optimizers."""
    objects = [one for one in gc.get_objects() if issubclass(type(one), Module | Optimizer)]
    modules = [one for one in objects if isinstance(one, Module) and "_modules" in vars(one)]
    children = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in children]
    return {f"{number}": one for number, one in enumerate([*roots, *(o for o in objects if isinstance(o, Optimizer))])}


def _of_module(name: str, root: Module) -> Iterator[tuple[Place, str]]:
    for path, module in root.named_modules():
        of = f"of {type(module).__name__}" + (f" {path!r}" if path else "")
        for attribute, value in vars(module).items():
            if attribute in _KINDS:
                yield from _registered(_KINDS[attribute], value, of)
            else:
                yield from ((_place(tensor), f"attribute {attribute} {of}") for tensor in leaves(value, _DEPTH))


def _registered(kind: str, tensors: Mapping[str, Tensor | None], of: str) -> Iterator[tuple[Place, str]]:
    for name, tensor in tensors.items():
        if tensor is not None:
            yield from ((_place(leaf), f"{kind} {name} {of}") for leaf in leaves(tensor))
            yield from ((_place(leaf), f"gradient of {name} {of}") for leaf in leaves(tensor.grad))


def _of_optimizer(optimizer: Optimizer, owners: Mapping[Place, str]) -> Iterator[tuple[Place, str]]:
    kind = type(optimizer).__name__
    for key, state in optimizer.state.items():
        whose = [owners[_place(leaf)] for leaf in leaves(key) if _place(leaf) in owners]
        for leaf in leaves(state):
            yield _place(leaf), f"optimizer state of {kind}" + (f" for {whose[0]}" if whose else "")


def _global_variables(tensors: Mapping[int, Place]) -> Iterator[tuple[Place, str]]:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in tensors:
                yield tensors[id(value)], f"global variable {name} of module {module.__name__}"


def _owners_of_dicts(dicts: list[dict[Any, Any]]) -> dict[int, object]:
    """The objects whose attributes are in these dictionaries."""
    wanted = {id(one) for one in dicts}
    having = gc.get_referrers(*dicts) if dicts else []
    return {id(vars(one)): one for one in having if hasattr(one, "__dict__") and id(vars(one)) in wanted}


def _describe(referrer: Any, tensor: object, owners: Mapping[int, object]) -> str:
    if isinstance(referrer, FrameType):
        code = referrer.f_code
        return (
            f"a variable of {code.co_name} ({code.co_filename}:{referrer.f_lineno}), kept by a traceback or generator"
        )
    if isinstance(referrer, CellType):
        return "a variable that a closure keeps"
    if isinstance(referrer, list | tuple | set | frozenset):
        return f"in a {type(referrer).__name__} of {len(referrer)}"
    if type(referrer) is dict:
        key = _key(referrer.items(), tensor)
        owner = owners.get(id(referrer))
        return f"in a dict, under {key!r}" if owner is None else f"attribute {key} of a {type(owner).__name__}"
    key = _key(getattr(referrer, "__dict__", {}).items(), tensor)
    return f"attribute {key} of a {type(referrer).__name__}" if key else f"held by a {type(referrer).__name__}"


def _key(items: Iterable[tuple[Any, Any]], tensor: object) -> Any:
    return next((key for key, value in items if value is tensor), None)


def _is_ours(referrer: object) -> bool:
    return isinstance(referrer, FrameType) and referrer.f_globals.get("__name__", "").startswith("lifecycle.memory.")


def _place(tensor: Tensor) -> Place:
    return tensor.device, tensor.untyped_storage().data_ptr()
