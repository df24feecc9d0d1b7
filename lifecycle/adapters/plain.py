"""Adapter for plain PyTorch: any modules, any ``torch.optim`` optimizers, one process, no process groups.

[Note: what is owned]
Parameters and persistent buffers are ``weights``; non-persistent buffers and what ``extra=`` declares are ``rest``;
optimizer state is ``optimizer``. Whatever shares a storage with an owned tensor is owned with it, in one slot, so that
the memory backend moves all views of it at once. Tensors kept as plain attributes, in containers, in dataclass or
attrs objects, or on other tensors are found too; each must be owned, declared or waived, since a checkpoint holds none
of them and a sleep would lose them without a word.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lifecycle.adapters.base import OwnedTensor
from lifecycle.adapters.changes import Attached, changes, missing
from lifecycle.adapters.discovery import Found, Kind, Root, describe, tensors_in, tensors_of
from lifecycle.errors import ManifestError
from lifecycle.hooks import Hooks
from states.resources import SLOT_REGION, Region, Slot

if TYPE_CHECKING:
    from lifecycle.adapters.base import Gate


Skeleton = dict[Any, Any]  # what was in an optimizer's state

# What shares a storage goes to one slot, the last of these: what may change must not be in a slot that may not.
_PRECEDENCE = (Slot.REST, Slot.FROZEN, Slot.STATE, Slot.TRAINED)


class PlainAdapter:
    """The tensors, gradients and hooks of ``model`` and ``optimizer``.

    ``model`` is a module, or a sequence of modules whose names get the prefixes ``0.``, ``1.``, …; ``optimizer`` is
    none, one or several. ``extra`` declares what else belongs to the actor: paths of attributes (``layers.3.cache``),
    patterns of them, or pairs of a name and a module that the model does not reach (a draft model). ``waive`` names
    attributes, by path or pattern, that are left alone.
    """

    name = "plain"

    def __init__(
        self,
        model: Module | Sequence[Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        extra: Iterable[str | Root] = (),
        waive: Iterable[str] = (),
    ) -> None:
        declared = list(extra)
        self._model = [("", model)] if isinstance(model, Module) else [(str(i), m) for i, m in enumerate(model)]
        self._beside = [item for item in declared if not isinstance(item, str)]
        self._extra = [item if isinstance(item, str) else f"{item[0]}.*" for item in declared]
        self._waive = list(waive)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        self._optimizers = {f"{i}." if len(optimizers) > 1 else "": one for i, one in enumerate(optimizers)}
        self._attached: dict[str, Attached] = {}
        self._stepped: dict[str, list[Tensor]] = {}
        self._listed: dict[str, weakref.ref[Tensor]] = {}
        self._discarded: list[Tensor] = []
        self._hooks: Hooks | None = None

    # -- what there is --------------------------------------------------------------------------------------------

    def tensors(self) -> tuple[OwnedTensor, ...]:
        """Parameters, buffers, attributes; views of their storages that an optimizer keeps come last.

        Raises ManifestError naming every tensor that belongs to no region, has no bytes (on the meta device) or
        shares its name, every entry of ``extra`` that names nothing, and every parameter that only an optimizer has.
        """
        found = self._find()
        slots = self._slots(found)
        problems = [*self._unowned(found, slots), *self._unfounded(found)]
        if problems:
            advice = "Declare in extra= what belongs to the actor, name in waive= what may be left alone."
            raise ManifestError("the model is not wholly owned", problems, advice)
        kept = [item._replace(name=f"optimizer.{item.name}") for item in self._optimizer_state(found)]
        return tuple(_owned([*found, *kept], slots))

    def _find(self) -> list[Found]:
        found = tensors_of(self._model)
        for index, item in enumerate(found):
            if item.kind is Kind.ATTRIBUTE and _matches(item.name, self._extra):
                found[index] = item._replace(kind=Kind.EXTRA)
        return found + [item._replace(kind=Kind.EXTRA) for item in tensors_of(self._beside)]

    def _slots(self, found: Iterable[Found]) -> dict[int, Slot]:
        stepped = {id(tensor) for optimizer in self._optimizers.values() for tensor in _params(optimizer)}
        slots: dict[int, Slot] = {}
        for item in found:
            if item.kind is not Kind.ATTRIBUTE:
                slot, key = _slot(item, stepped), _storage(item.tensor)
                slots[key] = max(slot, slots.get(key, slot), key=_PRECEDENCE.index)
        return slots

    def _unowned(self, found: Iterable[Found], slots: Collection[int]) -> Iterator[str]:
        for name, kind, tensor in found:
            if kind is not Kind.ATTRIBUTE:
                if tensor.is_meta:
                    yield f"{name}: is on the meta device and has no bytes"
            elif _storage(tensor) not in slots and not self._waived(name):
                yield f"{name}: belongs to no region ({describe(tensor)})"

    def _unfounded(self, found: Sequence[Found]) -> Iterator[str]:
        names = Counter(item.name for item in found)
        yield from (f"{name}: {times} tensors have this name" for name, times in names.items() if times > 1)
        for pattern in self._extra:
            if not any(_matches(name, [pattern]) for name in names):
                yield f"{pattern}: declared in extra=, but names no tensor"
        model = {id(item.tensor) for item in found if item.kind is Kind.PARAMETER}
        for prefix, optimizer in self._optimizers.items():
            for tensor in _params(optimizer):
                if id(tensor) not in model:
                    yield f"{_title(prefix)}: steps a parameter outside the model ({describe(tensor)}); pass its module"

    # -- what changed ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Take the present structure as the attached one; the memory backend has moved the tensors to their places."""
        self._attached = {item.name: Attached.now(item.tensor) for item in self._structure()}
        self._stepped = {prefix: list(_params(optimizer)) for prefix, optimizer in self._optimizers.items()}

    def check(self) -> None:
        """Compare with what was remembered. ``requires_grad`` may change; hooks follow it.

        Raises ManifestError naming what was added, removed, replaced, tied, untied, cast, moved, reshaped or given
        other bytes, and what came to or went from an optimizer's parameters.
        """
        now = {item.name: item.tensor for item in self._structure()}
        problems = [*changes(self._attached, now), *self._step_changes()]
        if problems:
            advice = "Undo it, or close() this actor and attach what there is now; waive= attributes that come and go."
            raise ManifestError("the model is not what was attached", problems, advice)
        if self._hooks is not None:
            self._hooks.listen()

    def _structure(self) -> list[Found]:
        return [item for item in self._find() if item.kind is not Kind.ATTRIBUTE or not self._waived(item.name)]

    def _waived(self, name: str) -> bool:
        return _matches(name, self._waive)

    def _step_changes(self) -> Iterator[str]:
        names = {id(was.tensor): name for name, was in reversed(self._attached.items())}
        for prefix, was in self._stepped.items():
            now = list(_params(self._optimizers[prefix]))
            gone, come = missing(was, now), missing(now, was)
            yield from (f"{_title(prefix)}: no longer has the parameter {names[id(t)]}" for t in gone)
            for tensor in come:
                name = names.get(id(tensor), f"a tensor that is not the model's, {describe(tensor)}")
                yield f"{_title(prefix)}: has a new parameter, {name}"

    # -- optimizer state ------------------------------------------------------------------------------------------

    def weight_names(self) -> frozenset[str]:
        """Parameters and persistent buffers; views of them that hang elsewhere are owned, but are not weights."""
        return frozenset(item.name for item in self._find() if item.kind in (Kind.PARAMETER, Kind.BUFFER))

    def has_optimizer(self) -> bool:
        return bool(self._optimizers)

    def optimizer_tensors(self) -> tuple[OwnedTensor, ...]:
        """State and tensor hyperparameters; what an optimizer keeps of the model's own bytes is not listed again.

        Raises ManifestError when there is state of a parameter that the model does not have.
        """
        now = self._optimizer_now()
        order = [name for name in self._listed if name in now] + [name for name in now if name not in self._listed]
        self._listed = {name: weakref.ref(now[name]) for name in order}
        return tuple(OwnedTensor(name, now[name], Region.OPTIMIZER, Slot.OPTIMIZER) for name in order)

    def optimizer_changed(self) -> bool:
        """Whether a tensor that ``optimizer_tensors`` returned last is gone, or another object has its name."""
        now = self._optimizer_now()
        return any((was := listed()) is None or now.get(name) is not was for name, listed in self._listed.items())

    def optimizer_skeleton(self) -> list[Skeleton]:
        """The state of each optimizer, dictionaries and lists copied, everything in them as it is."""
        return [_copied(dict(optimizer.state)) for optimizer in self._optimizers.values()]

    def rebuild_optimizer(self, skeleton: Sequence[Skeleton]) -> None:
        """Entries that still exist stay the same dictionaries."""
        for optimizer, was in zip(self._optimizers.values(), skeleton, strict=True):
            state = optimizer.state  # load_state_dict() has put another dictionary here
            now = dict(state)
            state.clear()
            for key, entry in was.items():
                state[key] = _copied(entry)
                if isinstance(kept := now.get(key), dict) and isinstance(entry, dict):
                    kept.clear()
                    kept.update(state[key])
                    state[key] = kept

    def _optimizer_now(self) -> dict[str, Tensor]:
        found = self._find()
        owned = {_storage(item.tensor) for item in found if item.kind is not Kind.ATTRIBUTE}
        distinct = {id(item.tensor): item for item in reversed(self._optimizer_state(found))}
        return {i.name: i.tensor for i in reversed(distinct.values()) if _storage(i.tensor) not in owned}

    def _optimizer_state(self, found: Sequence[Found]) -> list[Found]:
        return tensors_in([(path, state[key]) for path, state, key in self._entries(found)] + self._hyperparameters())

    def _entries(self, found: Sequence[Found]) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        names = {id(item.tensor): item.name for item in reversed(found) if item.kind is Kind.PARAMETER}
        for prefix, optimizer in self._optimizers.items():
            for key in optimizer.state:
                if not isinstance(key, Tensor):
                    yield f"{prefix}{key}", optimizer.state, key
                elif id(key) in names:
                    yield f"{prefix}{names[id(key)]}", optimizer.state, key
                else:
                    what = f"{_title(prefix)} keeps state of a parameter that is not the model's"
                    raise ManifestError(what, [describe(key)])

    def _hyperparameters(self) -> list[tuple[str, Any]]:
        return [
            (f"{prefix}param_groups.{index}.{key}", value)
            for prefix, optimizer in self._optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        ]

    # -- gradients ------------------------------------------------------------------------------------------------

    def grad_bytes(self) -> int:
        return sum(_nbytes(tensor.grad) for tensor in self._leaves().values() if tensor.grad is not None)

    def discard_grads(self) -> int:
        """Set every gradient to None, remembering whose it was. Returns the bytes."""
        freed = 0
        for tensor in self._leaves().values():
            if tensor.grad is not None:
                freed += _nbytes(tensor.grad)
                tensor.grad = None
                self._discarded.append(tensor)
        return freed

    def zero_grads(self) -> int:
        """Give zeros to those whose gradient was discarded and who have none since. Returns the bytes."""
        made = 0
        for tensor in self._discarded:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
                made += _nbytes(tensor.grad)
        self._discarded.clear()
        return made

    def _leaves(self) -> dict[str, Tensor]:
        owned = (item for item in reversed(self._find()) if item.kind is not Kind.ATTRIBUTE and item.tensor.is_leaf)
        distinct = {id(item.tensor): item for item in owned}  # under the first of its names
        return {item.name: item.tensor for item in distinct.values()}

    # -- what plain PyTorch does not have -------------------------------------------------------------------------

    def workspace_bytes(self) -> int:
        """0: plain modules keep no workspaces; a cache that is a tensor is an attribute, owned or waived."""
        return 0

    def drop_workspaces(self) -> int:
        """0, as there are none."""
        return 0

    def graphs_captured(self) -> bool:
        """False on the CPU; on CUDA nobody can be asked whether some graph holds these addresses, so True."""
        return any(item.tensor.is_cuda for item in self._find())

    def has_groups(self) -> bool:
        """False: collectives are another adapter's."""
        return False

    def groups_up(self) -> bool:
        """False, as there are none."""
        return False

    def suspend_groups(self) -> None:
        """Nothing to suspend."""

    def reload_groups(self) -> None:
        """Nothing to reload."""

    def settle(self) -> None:
        """Nothing to wait for: plain PyTorch starts no checkpoint writers or offload streams of its own, CPU kernels
        are done when they return, and device kernels are ordered by the stream that the memory backend uses too."""

    # -- hooks ----------------------------------------------------------------------------------------------------

    def install(self, gate: Gate) -> None:
        """Put the hooks on roots, and on modules that have tensors or contain one that has. Holds the gate weakly."""
        roots = [*self._model, *self._beside]
        paths = {item.name[:end] for item in self._find() for end, sign in enumerate(item.name) if sign == "."}
        modules = (pair for prefix, root in roots for pair in root.named_modules(prefix=prefix))
        reading = [module for path, module in modules if path in paths]
        self._hooks = Hooks([root for _, root in roots], reading, self._optimizers.values(), self._leaves())
        self._hooks.install(gate)

    def installed(self) -> bool:
        return self._hooks is not None

    def guard_released(self, released: bool) -> None:
        """Refuse forwards while weights are released; without hooks there is nothing to guard."""
        if self._hooks is not None:
            self._hooks.guard(released)

    def remove(self) -> None:
        """Take every hook off and forget the attached structure; again does nothing."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._attached.clear()  # its aliases would stand in the way of whoever takes the tensors over next
        self._stepped.clear()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _title(prefix: str) -> str:
    return f"optimizer {prefix.rstrip('.')}".rstrip()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    # Not its address: a storage that is released has none, and is still shared by the same tensors.
    return int(tensor.untyped_storage()._cdata)


def _slot(item: Found, stepped: Collection[int]) -> Slot:
    if item.kind is Kind.PARAMETER:
        return Slot.TRAINED if item.tensor.requires_grad or id(item.tensor) in stepped else Slot.FROZEN
    return Slot.STATE if item.kind is Kind.BUFFER else Slot.REST


def _owned(found: Iterable[Found], slots: Mapping[int, Slot]) -> Iterator[OwnedTensor]:
    listed: set[int] = set()
    for name, kind, tensor in found:
        slot = slots.get(_storage(tensor))
        if slot is None:  # waived, or optimizer state with a storage of its own
            continue
        if id(tensor) not in listed or kind is not Kind.ATTRIBUTE:
            yield OwnedTensor(name, tensor, SLOT_REGION[slot], slot)
        listed.add(id(tensor))


def _copied(value: Any) -> Any:
    """Dictionaries, lists and tuples anew, all the way down; what is in them as it is."""
    if isinstance(value, dict):
        return {key: _copied(held) for key, held in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
