"""Choosing the parts of a controller by name, and refusing an actor that another controller has."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lifecycle.adapters.base import Adapter
from lifecycle.errors import ManifestError, MissingExtra
from lifecycle.hoststore.base import HostStore
from lifecycle.memory.base import MemoryBackend
from lifecycle.versions import ACTOR
from states.spec import MachineSpec

if TYPE_CHECKING:
    from lifecycle.memory.choose import Choice


def make_backend(memory: str | MemoryBackend, name: str, device_type: str) -> Choice:
    """The memory backend of the actor of this name, whose tensors are on this type of device: see ``memory.choose``.

    Raises ValueError for an unknown name, MissingExtra and SaverUnusable where the one asked for can not work here.
    """
    from lifecycle.memory.choose import choose

    _need_torch("a memory backend")
    return choose(memory, device_type, name)


def device_type_of(adapter: Adapter) -> str:
    """Where the adapter's tensors are: "cpu" where all are, else the accelerator's type."""
    return next((owned.tensor.device.type for owned in adapter.tensors() if owned.tensor.device.type != "cpu"), "cpu")


def make_store(host: str | HostStore, device_type: str) -> HostStore:
    """ "auto" is "shared", which engines of this host read from, where memory can be shared by descriptor (Linux) and,
    beside an accelerator, in huge pages: without them the first copy takes twice as long; else "pinned"."""
    if not isinstance(host, str):
        return host
    from lifecycle.hoststore import disk, pinned, shared
    from lifecycle.memory import pages

    if host == "auto":
        huge = device_type == "cpu" or pages.huge_pages("shmem_enabled") in ("always", "advise", "within_size")
        host = "shared" if sys.platform == "linux" and huge else "pinned"
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
