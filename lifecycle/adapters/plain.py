"""Adapter for plain PyTorch: any modules, any ``torch.optim`` optimizers, one process, no process groups.

[Note: what is owned]
Parameters and persistent buffers are ``weights``; non-persistent buffers and what ``extra=`` declares are ``rest``;
optimizer state is ``optimizer``. Whatever shares a storage with an owned tensor is owned with it, in one slot, so that
the memory backend moves all views of it at once. Tensors kept as plain attributes, in containers, in dataclass or
attrs objects, or on other tensors are found too; each must be owned, declared or waived, since a checkpoint holds none
of them and a sleep would lose them without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lifecycle import graphs
from lifecycle.adapters.base import OwnedTensor
from lifecycle.adapters.blocks import Cut, cut
from lifecycle.adapters.changes import Attached, changes, missing, same
from lifecycle.adapters.discovery import Found, Kind, Root, describe, tensors_of
from lifecycle.adapters.optimizers import params_of, state_of, title_of
from lifecycle.adapters.skeletons import Skeleton, beside_accelerator, kept, put_back
from lifecycle.errors import ManifestError
from lifecycle.hooks import Hooks
from lifecycle.workspaces.known import known
from lifecycle.workspaces.registry import Dropper, Workspaces
from states.resources import SLOT_REGION, Region, Slot

if TYPE_CHECKING:
    from lifecycle.adapters.base import Gate


# What shares a storage goes to one slot, the last of these: what may change must not be in a slot that may not.
_PRECEDENCE = (Slot.REST, Slot.FROZEN, Slot.STATE, Slot.TRAINED)


class PlainAdapter:
    """The tensors, gradients and hooks of ``model`` and ``optimizer``.

    ``model`` is a module, or a sequence of modules whose names get the prefixes ``0.``, ``1.``, …; ``optimizer`` is
    none, one or several. ``extra`` declares what else belongs to the actor: paths of attributes (``layers.3.cache``),
    patterns of them, or pairs of a name and a module that the model does not reach (a draft model). ``waive`` names
    attributes, by path or pattern, that are left alone. ``workspaces`` are droppers of this actor's own, beside those
    that are known and those registered for all (``lifecycle.workspaces``); ``None`` has nothing dropped.
    """

    name = "plain"

    def __init__(
        self,
        model: Module | Sequence[Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        extra: Iterable[str | Root] = (),
        waive: Iterable[str] = (),
        workspaces: Iterable[Dropper] | None = (),
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
        self._listed: dict[str, None] = {}  # names of optimizer state, in the order in which they were listed last
        self._discarded: list[Tensor] = []
        self._owned_last: list[Found] = []  # what the last look at the structure found that is no attribute
        self._distinct_last: list[Tensor] = []  # the tensors of those, each once
        self._hooks: Hooks | None = None
        self._cut: Cut | None = None  # made when first asked for: the structure does not change while attached
        roots = [module for _, module in [*self._model, *self._beside]]
        self.droppers = Workspaces(everyone=False) if workspaces is None else Workspaces([*known(roots), *workspaces])
        graphs.observe()

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
        kept = [item._replace(name=f"optimizer.{item.name}") for item in state_of(self._optimizers, found)]
        return tuple(_owned([*found, *kept], slots))

    def _find(self) -> list[Found]:
        found = tensors_of(self._model)
        for index, item in enumerate(found if self._extra else ()):
            if item.kind is Kind.ATTRIBUTE and _matches(item.name, self._extra):
                found[index] = item._replace(kind=Kind.EXTRA)
        return found + [item._replace(kind=Kind.EXTRA) for item in tensors_of(self._beside)]

    def _slots(self, found: Iterable[Found]) -> dict[int, Slot]:
        stepped = {id(tensor) for optimizer in self._optimizers.values() for tensor in params_of(optimizer)}
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
            for tensor in params_of(optimizer):
                if id(tensor) not in model:
                    what = f"steps a parameter outside the model ({describe(tensor)}); pass its module"
                    yield f"{title_of(prefix)}: {what}"

    # -- what changed ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Take the present structure as the attached one; the memory backend has moved the tensors to their places."""
        self._attached = {item.name: Attached.now(item.tensor) for item in self._structure()}
        self._stepped = {prefix: list(params_of(optimizer)) for prefix, optimizer in self._optimizers.items()}

    def check(self) -> None:
        """Compare with what was remembered. ``requires_grad`` may change; hooks follow it.

        Raises ManifestError naming what was added, removed, replaced, tied, untied, cast, moved, reshaped or given
        other bytes, and what came to or went from an optimizer's parameters.
        """
        found = self._structure()
        problems = [] if same(self._attached, found) else list(changes(self._attached, _by_name(found)))
        problems += self._step_changes()
        if problems:
            advice = (
                "Undo it, or close() this actor and attach what there is now; waive= attributes that come and go. "
                "While it sleeps or is switched, its weights are in copies alone: read them with weights(tag), then "
                "close(force=True)."
            )
            raise ManifestError("the model is not what was attached", problems, advice)
        if self._hooks is not None:
            self._hooks.listen()

    def _structure(self) -> list[Found]:
        found = self._find()
        self._owned_last = _without_attributes(found)
        self._distinct_last = _distinct(self._owned_last)
        if len(self._owned_last) == len(found):
            return found
        return [item for item in found if item.kind is not Kind.ATTRIBUTE or not self._waived(item.name)]

    def _owned_now(self) -> list[Found]:
        """As of the last check: what changed since, the next one refuses. Looking takes as long as a small copy."""
        return self._owned_last or _without_attributes(self._find())

    def _waived(self, name: str) -> bool:
        return _matches(name, self._waive)

    def _step_changes(self) -> Iterator[str]:
        for prefix, was in self._stepped.items():
            now = list(params_of(self._optimizers[prefix]))
            gone, come = missing(was, now), missing(now, was)
            names = {id(was.tensor): name for name, was in reversed(self._attached.items())} if gone or come else {}
            yield from (f"{title_of(prefix)}: no longer has the parameter {names[id(t)]}" for t in gone)
            for tensor in come:
                name = names.get(id(tensor), f"a tensor that is not the model's, {describe(tensor)}")
                yield f"{title_of(prefix)}: has a new parameter, {name}"

    # -- optimizer state ------------------------------------------------------------------------------------------

    def weight_names(self) -> frozenset[str]:
        """Parameters and persistent buffers; views of them that hang elsewhere are owned, but are not weights."""
        return frozenset(item.name for item in self._find() if item.kind in (Kind.PARAMETER, Kind.BUFFER))

    def has_optimizer(self) -> bool:
        return bool(self._optimizers)

    def optimizer_tensors(self) -> tuple[OwnedTensor, ...]:
        """State and tensor hyperparameters; what an optimizer keeps of the model's own bytes is not listed again.

        Nor are tensors on the CPU beside parameters elsewhere: [Note: host state] in ``adapters.skeletons``.
        Raises ManifestError when there is state of a parameter that the model does not have.
        """
        now = self._optimizer_now()
        if self._listed.keys() != now.keys():
            self._listed = {name: None for name in self._listed if name in now} | dict.fromkeys(now)
        return tuple(OwnedTensor(name, now[name], Region.OPTIMIZER, Slot.OPTIMIZER) for name in self._listed)

    def optimizer_skeleton(self) -> list[Skeleton]:
        """The state of each optimizer, dictionaries and lists copied, everything in them as it is."""
        host = bool(self._optimizers) and self._beside_accelerator(self._owned_now())
        return [kept(optimizer.state, host) for optimizer in self._optimizers.values()]

    def rebuild_optimizer(self, skeleton: Sequence[Skeleton]) -> None:
        """Entries that still exist stay the same dictionaries."""
        for optimizer, was in zip(self._optimizers.values(), skeleton, strict=True):
            state = optimizer.state  # load_state_dict() has put another dictionary here
            now = dict(state)
            state.clear()
            for key, entry in was.items():
                state[key] = put_back(entry)
                if isinstance(same := now.get(key), dict) and isinstance(entry, dict):
                    same.clear()
                    same.update(state[key])
                    state[key] = same

    def _optimizer_now(self) -> dict[str, Tensor]:
        if not self._optimizers:
            return {}
        found = self._owned_now()
        host, now, known = self._beside_accelerator(found), dict[str, Tensor](), set[int]()
        owned = {_storage(tensor) for _, _, tensor in found}
        for name, _, tensor in state_of(self._optimizers, found):
            if id(tensor) not in known and not (host and tensor.is_cpu) and _storage(tensor) not in owned:
                known.add(id(tensor))  # under the first of its names
                now[name] = tensor
        return now

    def _beside_accelerator(self, found: Iterable[Found]) -> bool:
        return beside_accelerator(item.tensor for item in found if item.kind is Kind.PARAMETER)

    # -- gradients ------------------------------------------------------------------------------------------------

    def grad_bytes(self) -> int:
        return sum(_nbytes(grad) for tensor in self._leaves() if (grad := tensor.grad) is not None)

    def discard_grads(self) -> int:
        """Set every gradient to None, remembering whose it was. Returns the bytes."""
        freed = 0
        for tensor in self._leaves():
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

    def _leaves(self) -> list[Tensor]:
        """Owned tensors that may have a gradient of their own: only those may be asked for it."""
        return [tensor for tensor in self._distinct_last or _distinct(self._owned_now()) if tensor.is_leaf]

    # -- workspaces and graphs --------------------------------------------------------------------------------------

    def workspace_bytes(self) -> int:
        return self.droppers.nbytes()

    def drop_workspaces(self) -> int:
        """``droppers.report`` says afterwards what each dropper gave back."""
        return self.droppers.drop()

    def workspaces_dropped(self) -> tuple[tuple[str, int], ...]:
        return tuple((one.name, one.nbytes) for one in self.droppers.report)

    def why_graphs(self) -> str:
        return graphs.captured().why

    def graphs_captured(self) -> bool:
        """``lifecycle.graphs.captured().why`` says why. A graph of any part of the process counts; False on the CPU."""
        return bool(graphs.captured()) and (_on_cuda(self._owned_now()) or _on_cuda(self._find()))

    # -- what plain PyTorch does not have -------------------------------------------------------------------------

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
        leaves = {item.name: item.tensor for item in reversed(self._owned_now()) if item.tensor.is_leaf}
        self._hooks = Hooks([root for _, root in roots], reading, self._optimizers.values(), leaves)
        self._hooks.install(gate)

    def installed(self) -> bool:
        return self._hooks is not None

    def blocks(self) -> tuple[frozenset[str], ...]:
        """See ``lifecycle.adapters.blocks``; none where a submodule is compiled or scripted."""
        self._cut = self._cut or cut(self._model)
        return self._cut.names

    def guard_arriving(self, blocks: bool | None) -> None:
        if self._hooks is not None:
            waits = self._cut.waits if blocks and self._cut is not None else ()
            self._hooks.expect(None if blocks is None else waits)

    def guard_released(self, released: bool) -> None:
        """Refuse forwards while weights are released; without hooks there is nothing to guard."""
        if self._hooks is not None:
            self._hooks.guard(released)

    def remove(self) -> None:
        """Take every hook off and forget the attached structure; again does nothing."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._cut = None  # whoever attaches next may have other modules
        self._attached.clear()  # its aliases would stand in the way of whoever takes the tensors over next
        self._stepped.clear()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _without_attributes(found: Iterable[Found]) -> list[Found]:
    attribute = Kind.ATTRIBUTE  # looking a member up takes longer than all the rest
    return [item for item in found if item.kind is not attribute]


def _by_name(found: Iterable[Found]) -> dict[str, Tensor]:
    return {item.name: item.tensor for item in found}


def _distinct(found: Iterable[Found]) -> list[Tensor]:
    return list({id(tensor): tensor for _, _, tensor in found}.values())


def _on_cuda(found: Iterable[Found]) -> bool:
    return any(item.tensor.is_cuda for item in found)


def _storage(tensor: Tensor) -> int:
    # Not its address: a storage that is released has none, and is still shared by the same tensors.
    number: int = tensor.untyped_storage()._cdata
    return number


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
