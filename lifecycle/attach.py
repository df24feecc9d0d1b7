"""Choosing the parts of a controller by name, and refusing an actor that another controller has."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lifecycle.adapters.base import Adapter
from lifecycle.errors import ManifestError, MissingExtra
from lifecycle.hoststore.base import HostStore
from lifecycle.memory.base import MemoryBackend


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
