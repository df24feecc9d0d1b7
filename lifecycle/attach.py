"""Choosing the parts of a controller by name, and refusing an actor that another controller has."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lifecycle.adapters.base import Adapter
from lifecycle.errors import ManifestError, MissingExtra
from lifecycle.hoststore.base import HostStore
from lifecycle.memory.base import MemoryBackend
from lifecycle.versions import ACTOR
from states.spec import MachineSpec


def make_backend(memory: str | MemoryBackend) -> MemoryBackend:
    """ "auto" and "arena": the CPU's backend. Raises ValueError for an unknown name."""
    if not isinstance(memory, str):
        return memory
    if memory not in ("auto", "arena"):
        raise ValueError(f"memory={memory!r}: known backends are 'auto' and 'arena'; or give a MemoryBackend")
    _need_torch("a memory backend")
    from lifecycle.memory.arena import ArenaBackend

    return ArenaBackend()


def make_store(host: str | HostStore) -> HostStore:
    """ "auto" is "shared" where memory can be shared by descriptor (Linux), else "pinned"."""
    if not isinstance(host, str):
        return host
    from lifecycle.hoststore import disk, pinned, shared

    if host == "auto":
        host = "shared" if sys.platform == "linux" else "pinned"
    if host == "pinned":
        return pinned.PinnedStore()
    if host == "shared":
        return shared.SharedStore()
    if host.startswith("disk:"):
        return disk.DiskStore(host.removeprefix("disk:"))
    raise ValueError(f"host={host!r}: known stores are 'auto', 'pinned', 'shared' and 'disk:PATH'; or give a HostStore")


def make_adapter(model: Any, optimizer: Any, extra: Sequence[Any], waive: Sequence[str]) -> Adapter:
    _need_torch("adapter 'plain'")
    from lifecycle.adapters.plain import PlainAdapter

    return PlainAdapter(model, optimizer, extra=extra, waive=waive)


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise ValueError(f"tags={tags!r}: give a sequence of names, such as ({tags!r},)")
    names = tuple(tags)
    wrong = [name for name in names if not isinstance(name, str) or not name.isidentifier() or name == ACTOR]
    if wrong or len(set(names)) != len(names):
        raise ValueError(f"tags={names}: tags are distinct identifiers other than 'actor', which is always there")
    return names


def _need_torch(feature: str) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtra(feature, "torch", "torch") from error


def refuse_second_attach(adapter: Adapter, others: Iterable[Collection[int]]) -> None:
    """Raise ManifestError if a tensor of this adapter belongs to another controller; others' are given by ``id``."""
    mine = {id(owned.tensor): owned.name for owned in adapter.tensors()}
    for theirs in others:
        shared = [name for number, name in mine.items() if number in theirs]
        if shared:
            raise ManifestError(
                "already attached to another ActorLifecycle", shared, "close() that one first, or use it."
            )


def refuse_untrained_optimizer(adapter: Adapter, machine: MachineSpec) -> None:
    """Raise ValueError if there is an optimizer that this machine never lets step."""
    if adapter.has_optimizer() and all(row.event != "begin_training" for row in machine.rows):
        raise ValueError(f"machine {machine.name!r} does not train: attach the model without its optimizer")
