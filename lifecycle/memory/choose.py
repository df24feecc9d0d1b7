"""Which memory backend an actor gets, and why; and where tensors go that are made for it beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from attrs import frozen

from lifecycle.errors import LifecycleError, MissingExtra, TransitionRefused
from lifecycle.memory.base import MemoryBackend
from states.resources import Region

BACKENDS = ("auto", "arena", "storage", "torch_memory_saver")
POOLS = (Region.WEIGHTS, Region.GRADS, Region.OPTIMIZER, Region.REST)

_open: ContextVar[Region | None] = ContextVar("open region", default=None)


@frozen(eq=False)
class Choice:
    """A memory backend, and in one line which it is and why."""

    backend: MemoryBackend
    why: str


def choose(memory: str | MemoryBackend, device_type: str, name: str = "actor") -> Choice:
    """The backend for the actor of this name, whose tensors are on this type of device.

    "auto" is the memory saver on CUDA where it can be used, else ``storage`` there and on other accelerators, and
    ``arena`` on the CPU. Raises ValueError for an unknown name; MissingExtra, SaverUnusable or TransitionRefused where
    "torch_memory_saver" was asked for and can not be used.
    """
    if not isinstance(memory, str):
        return Choice(memory, f"memory: {memory.name}, as given")
    _known(memory)
    if memory == "torch_memory_saver":
        return _saver(name)
    if memory == "arena" or (memory == "auto" and device_type == "cpu"):
        from lifecycle.memory.arena import ArenaBackend

        return Choice(ArenaBackend(), f"memory: arena, {_because(memory, 'the tensors are on the CPU')}")
    if memory == "auto" and device_type == "cuda":
        try:
            return _saver(name)
        except MissingExtra as error:
            missing = f"{error.package} is not installed: pip install 'actor-lifecycle[{error.extra}]'"
            return _storage(device_type, f"because {missing}")
        except LifecycleError as error:
            return _storage(device_type, f"because {error}")
    return _storage(device_type, _because(memory, f"the tensors are on {device_type}"))


@contextmanager
def allocating(name: str, actor: str = "actor", memory: str = "auto", reserve: int = 0) -> Iterator[Region]:
    """See ``lifecycle.region``."""
    if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
        raise ValueError(f"reserve={reserve!r}: the bytes to take at once, 0 or more; enter the region once per piece")
    if name not in list(Region) or Region(name) not in POOLS:
        raise ValueError(f"region {name!r} is no pool: allocate in one of {', '.join(POOLS)}, or in none")
    entered = Region(name)
    if (outer := _open.get()) is not None:
        raise TransitionRefused(
            f"region({name!r})", f"region({outer.value!r})", (), "regions do not nest", "Leave that block first."
        )
    token = _open.set(entered)
    try:
        with _pool(_known(memory), actor, entered, reserve):
            yield entered
    finally:
        _open.reset(token)


def _pool(memory: str, actor: str, region: Region, reserve: int) -> AbstractContextManager[None]:
    if memory not in ("auto", "torch_memory_saver") or (memory == "auto" and not _cuda()):
        return nullcontext()
    from lifecycle.memory import saver
    from lifecycle.memory.torch_memory_saver import pool_name

    try:
        book = saver.ledger()
    except LifecycleError:
        if memory == "auto":
            return nullcontext()  # as the actor will be given `storage`, for the same reason
        raise
    return book.allocating(pool_name(actor, region), reserve=reserve)


def _known(memory: str) -> str:
    if memory not in BACKENDS:
        raise ValueError(f"memory={memory!r}: known are {', '.join(map(repr, BACKENDS))}; or give a MemoryBackend")
    return memory


def _saver(name: str) -> Choice:
    from lifecycle.memory import saver
    from lifecycle.memory.torch_memory_saver import TorchMemorySaverBackend

    backend = TorchMemorySaverBackend(name)
    return Choice(backend, f"memory: torch_memory_saver {saver.saver_version()}, hook mode {saver.ledger().mode}")


def _storage(device_type: str, why: str) -> Choice:
    from lifecycle.memory.storage import StorageBackend

    return Choice(StorageBackend(device_type), f"memory: storage, {why}")


def _because(memory: str, reason: str) -> str:
    return f"because {reason}" if memory == "auto" else "as asked"


def _cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
