"""What else can be done with the same bytes: ways to sleep and wake, those in use today and those that bound us.

Each peer has memory of its own, shaped like the model's. ``sleep`` and ``wake`` may return before the device is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Protocol

import torch
from torch import Tensor, nn

from lifecycle.bench import saver
from lifecycle.bench.model import random_weights
from lifecycle.bench.packing import Shapes
from lifecycle.bench.saver import missing_saver
from lifecycle.bench.shapes import llama_shapes
from lifecycle.hoststore.base import tensor_over
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.memory.arena import ArenaBackend
from states.resources import Region, Slot

_ALIGNMENT = 64  # of tensors in a host buffer, in bytes
_numbers = count(1)  # the saver's pools are the process's: each peer needs one of its own


class Peer(Protocol):
    """A set of tensors that can be put to sleep and woken."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class NaiveTo:
    """Every parameter by ``.to("cpu")``, and back by ``.to("cuda")``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._device = next(iter(tensors.values())).device
        self._model = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors.values())

    def sleep(self) -> None:
        self._model.to("cpu")
        torch.cuda.empty_cache()  # else nobody else could use what was freed

    def wake(self) -> None:
        self._model.to(self._device)


class SaverPool:
    """A pool of torch-memory-saver, paused and resumed. Without ``backup`` its contents are lost.

    With ``retain`` the saver keeps its pinned backups between pauses, which it does not by default.
    """

    def __init__(self, shapes: Shapes, device: torch.device, backup: bool, retain: bool = False) -> None:
        self._tag, self._retain = f"bench-peer-{next(_numbers)}", retain
        with saver.allocating(self._tag, backup) as self._saver:
            self.tensors = random_weights(shapes, device)

    def sleep(self) -> None:
        self._saver.retain_cpu_backup = self._retain  # the process's; each pool sets it for itself
        self._saver.pause(self._tag)

    def wake(self) -> None:
        self._saver.retain_cpu_backup = self._retain
        self._saver.resume(self._tag)
        self._saver.retain_cpu_backup = False


class StorageRelease:
    """Storages resized to nothing and back, contents lost."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.tensors = random_weights(shapes, device)
        self._storages = [(one.untyped_storage(), one.untyped_storage().nbytes()) for one in self.tensors.values()]

    def sleep(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)


class ArenaRelease:
    """The pages of CPU tensors dropped and taken again, contents lost."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.tensors = random_weights(shapes, device)
        self._backend = ArenaBackend()
        self._backend.adopt(Slot.TRAINED, Region.WEIGHTS, self.tensors)

    def sleep(self) -> None:
        self._backend.pause(Region.WEIGHTS)

    def wake(self) -> None:
        self._backend.resume(Region.WEIGHTS)


class TensorCopies:
    """Page-locked copies, tensor by tensor. ``host``: uint8, at least ``host_bytes(tensors)`` long."""

    def __init__(self, tensors: Sequence[Tensor], host: Tensor) -> None:
        self._pairs = list(zip(tensors, host_views(tensors, host), strict=True))

    def out(self) -> None:
        for tensor, copy in self._pairs:
            copy.copy_(tensor, non_blocking=True)

    def into(self) -> None:
        for tensor, copy in self._pairs:
            tensor.copy_(copy, non_blocking=True)


class PerTensorCopies:
    """Page-locked copies tensor by tensor, all made at every sleep and all restored at every wake.

    ``release`` gives the memory back, contents lost.
    """

    def __init__(self, release: Peer, copies: TensorCopies) -> None:
        self._release, self._copies = release, copies

    def sleep(self) -> None:
        self._copies.out()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are whole before their source goes
        self._release.sleep()

    def wake(self) -> None:
        self._release.wake()
        self._copies.into()


class Link:
    """Plain copies between one flat device tensor and one flat page-locked buffer: what no copy can beat."""

    def __init__(self, nbytes: int, device: torch.device, host: Tensor) -> None:
        self.nbytes = nbytes
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
        self._host = host[:nbytes]

    def out(self) -> None:
        self._host.copy_(self._device, non_blocking=True)

    def into(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class BothWays:
    """Out of one buffer and into another at once: what no switch can beat. On the CPU one after the other."""

    def __init__(self, out: Link, into: Link) -> None:
        self._out, self._into = out, into
        self._streams = [_stream(), _stream()] if torch.cuda.is_available() else []

    def one_after_the_other(self) -> None:
        self._out.out()
        self._into.into()

    def at_once(self) -> None:
        """The device is idle when this is called, so nothing has to be waited for."""
        if not self._streams:
            self.one_after_the_other()
            return
        with torch.cuda.stream(self._streams[0]):
            self._out.out()
        with torch.cuda.stream(self._streams[1]):
            self._into.into()


class PairSwitch:
    """Two sets of weights of which one is awake: the other is shown by putting this one to sleep."""

    def __init__(self, shown: Peer, asleep: Peer) -> None:
        asleep.sleep()
        self._shown, self._asleep = shown, asleep

    def switch(self) -> None:
        self._shown.sleep()
        self._asleep.wake()
        self._shown, self._asleep = self._asleep, self._shown


def bare_release(backend: str, shapes: Shapes, device: torch.device) -> SaverPool | StorageRelease | ArenaRelease:
    """Tensors of these shapes, whose memory the backend of that name would give back and take again, contents lost.

    Raises ValueError for a backend that is not known here.
    """
    if backend == "torch_memory_saver":
        return SaverPool(shapes, device, backup=False)
    if backend == "storage":
        return StorageRelease(shapes, device)
    if backend == "arena":
        return ArenaRelease(shapes, device)
    raise ValueError(f"memory={backend!r}: the benchmark knows torch_memory_saver, storage and arena")


def saver_peers(nbytes: int, device: torch.device) -> tuple[dict[str, Peer], tuple[str, ...]]:
    """The memory saver as users have it: by name, its backups retained, and its default. And what is left out, why."""
    reason = missing_saver()
    if reason is not None:
        return {}, (f"torch-memory-saver's backups: {reason}",)
    return {
        SAVER_RETAINED: SaverPool(llama_shapes(nbytes), device, backup=True, retain=True),
        SAVER_DEFAULT: SaverPool(llama_shapes(nbytes), device, backup=True),
    }, ()


SAVER_RETAINED = "memory saver, backup retained"
SAVER_DEFAULT = "memory saver, default backup"
PER_TENSOR = "pinned copy per tensor, every time"
NAIVE = ".to() per parameter"
PLAIN = "plain pinned copy"


def naive_peers(nbytes: int, device: torch.device) -> tuple[dict[str, Peer], tuple[str, ...]]:
    """``.to()``, by name; and what is left out, why."""
    if device.type == "cpu":
        return {}, (f"{NAIVE}: on the CPU it moves nothing",)
    return {NAIVE: NaiveTo(random_weights(llama_shapes(nbytes), device))}, ()


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def host_buffer(nbytes: int) -> Tensor:
    """uint8 of shape (nbytes,), page-locked where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else the store takes this for a process that uses none
    return tensor_over(_store.allocate(nbytes))


_store = PinnedStore()  # of the process: a buffer must not go while a peer may still copy from it


def host_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that ``host_views`` needs."""
    return sum(_aligned(tensor) for tensor in tensors)


def host_views(tensors: Sequence[Tensor], host: Tensor) -> list[Tensor]:
    """For each tensor a view of ``host`` of its shape and type, one after the other."""
    views, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        views.append(host[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
        at += _aligned(tensor)
    return views


def _aligned(tensor: Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
