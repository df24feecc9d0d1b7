"""The weights of the engine's model: in one anonymous mapping, written straight from the sender's memory."""

from __future__ import annotations

import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from lifecycle.fingerprint import fingerprint
from lifecycle.sync.base import SentTensor, UpdateManifest

#: Integers that stand for the raw bytes of an element, by its size: copying them changes no bit.
_RAW: dict[int, tuple[torch.dtype, type[np.generic]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}

#: Storages start at cache lines, as the allocator they came from had them.
_ALIGNMENT = 64


def manifest_from_plain(plain: Mapping[str, Any]) -> UpdateManifest:
    """What ``UpdateManifest.to_plain`` gave, after a journey as JSON. Raises TypeError or KeyError on anything else."""
    tensors = (
        SentTensor(**{**sent, "shape": tuple(sent["shape"]), "stride": tuple(sent["stride"])})
        for sent in plain["tensors"]
    )
    return UpdateManifest(version=plain["version"], tensors=tuple(tensors))


@frozen(eq=False)
class _Move:
    target: np.ndarray[Any, Any]
    source: np.ndarray[Any, Any]


class ModelWeights:
    """Parameters and persistent buffers live in the pool; other buffers (rotary tables) keep their own memory.

    The tensor objects of the model stay the same for ever, and so do their addresses: a release only gives the pages
    of the mapping back. Until an update has come the contents are zeros.
    """

    def __init__(self, model: nn.Module) -> None:
        pooled, others = _split(model)
        self._required, self._known = pooled, {**others, **pooled}
        self._memory = _move_into_one_mapping(pooled.values())
        self._flat = np.frombuffer(self._memory, np.uint8)
        self.populate()

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def populate(self) -> None:
        """Bring every page in, filled with zeros, so that what is missing is missed now and not in an update."""
        self._flat.fill(0)

    def depopulate(self) -> None:
        """Give the memory back; the contents are lost."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def plan(self, manifest: UpdateManifest, segments: Mapping[int, mmap.mmap]) -> list[_Move]:
        """What the update would copy. Writes nothing. Raises ValueError naming everything that does not fit."""
        problems = [*self._misfits(manifest.tensors), *self._missing(manifest.tensors), *self._torn(manifest.tensors)]
        if problems:
            raise ValueError("; ".join(problems))
        moves, unreadable = [], []
        for sent in manifest.tensors:
            try:
                moves.append(_move(self._known[sent.name], sent, segments))
            except (ValueError, TypeError) as error:
                unreadable.append(f"{sent.name} ({error})")
        if unreadable:
            raise ValueError(_listed("can not be read", unreadable))
        return moves

    def write(self, moves: Iterable[_Move]) -> None:
        """Copy, tensor by tensor, from the sender's memory into the model's own, with nothing in between."""
        for move in moves:
            np.copyto(move.target, move.source)

    def differing(self, fingerprints: Mapping[str, str]) -> tuple[str, ...]:
        """Names whose bytes here have another fingerprint, or that this model lacks."""
        return tuple(
            name
            for name, expected in fingerprints.items()
            if name not in self._known or fingerprint(self._known[name]) != expected
        )

    def _misfits(self, tensors: Sequence[SentTensor]) -> list[str]:
        times = Counter(sent.name for sent in tensors)
        known = [sent for sent in tensors if sent.name in self._known]
        return [
            *_problem("unknown names", (name for name in times if name not in self._known)),
            *_problem("sent more than once", (name for name, count in times.items() if count > 1)),
            *_problem("dtype differs", (text for sent in known if (text := self._other(sent, "dtype", _dtype)))),
            *_problem("shape differs", (text for sent in known if (text := self._other(sent, "shape", _shape)))),
        ]

    def _other(self, sent: SentTensor, what: str, of: Callable[[Tensor], object]) -> str:
        here, there = of(self._known[sent.name]), getattr(sent, what)
        return "" if here == there else f"{sent.name} (sent {there}, here {here})"

    def _missing(self, tensors: Sequence[SentTensor]) -> list[str]:
        sent_names = {sent.name for sent in tensors}
        covered = {_place(self._known[name]) for name in sent_names if name in self._known}
        absent = (
            name for name, tensor in self._required.items() if name not in sent_names and _place(tensor) not in covered
        )
        return _problem("missing names", absent)

    def _torn(self, tensors: Sequence[SentTensor]) -> list[str]:
        """Names that are one tensor here but came with different bytes: one of them would be lost silently."""
        contents: dict[object, set[str]] = defaultdict(set)
        names: dict[object, list[str]] = defaultdict(list)
        for sent in tensors:
            if sent.name in self._known:
                place = _place(self._known[sent.name])
                contents[place].add(sent.fingerprint)
                names[place].append(sent.name)
        torn = (" = ".join(names[place]) for place, different in contents.items() if len(different) > 1)
        return _problem("one tensor here, but sent with different contents", torn)


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors by name: what a checkpoint would hold, and the non-persistent buffers. Tied names all appear."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    pooled: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    others: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        (others if name in transient else pooled)[name] = buffer
    return pooled, others


def _move_into_one_mapping(tensors: Iterable[Tensor]) -> mmap.mmap:
    """Give each distinct storage a slice of one anonymous mapping; views and ties among the tensors survive."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    starts: dict[int, int] = {}
    total = 0
    for tensor in distinct:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = total
            total += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    pages = max(1, -(-total // mmap.PAGESIZE))
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.from_numpy(np.frombuffer(memory, np.uint8))
    # All places first: an address that is free again may be handed out for another storage.
    places = [(tensor, starts[tensor.untyped_storage().data_ptr()]) for tensor in distinct]
    for tensor, start in places:
        offset = start // tensor.element_size() + tensor.storage_offset()
        tensor.data = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
    return memory


def _move(target: Tensor, sent: SentTensor, segments: Mapping[int, mmap.mmap]) -> _Move:
    """numpy checks that every element lies inside the segment, whatever the strides."""
    if sent.segment not in segments:
        raise ValueError(f"segment {sent.segment} did not come")
    itemsize = target.element_size()
    as_torch, as_numpy = _RAW[itemsize]
    source: np.ndarray[Any, Any] = np.ndarray(
        sent.shape,
        dtype=as_numpy,
        buffer=segments[sent.segment],
        offset=sent.offset,
        strides=tuple(step * itemsize for step in sent.stride),
    )
    return _Move(target.detach().view(as_torch).numpy(), source)


def _place(tensor: Tensor) -> object:
    """Equal for two tensors that are the same elements of the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _problem(what: str, offenders: Iterable[str]) -> list[str]:
    found = list(offenders)
    return [_listed(what, found)] if found else []


def _listed(what: str, offenders: Sequence[str]) -> str:
    shown = ", ".join(offenders[:20]) + (f" and {len(offenders) - 20} more" if len(offenders) > 20 else "")
    return f"{what}: {shown}"
