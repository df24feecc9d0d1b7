"""Things that go wrong on request: an action of an event, an allocation, too little memory, an engine."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import Tensor

from lifecycle.actions import Action, Call
from lifecycle.hoststore.base import HostBuffer, HostStore
from lifecycle.memory.arena import ArenaBackend
from lifecycle.sync.base import SentTensor, Transport, UpdateManifest
from lifecycle.testing.engines import FakeEngine
from lifecycle.versions import Facts

if TYPE_CHECKING:
    from lifecycle.controller import ActorLifecycle


@define
class Fault:
    """One action of what runs ``inside`` raises: the ``at``-th, counted from 0, before it acts or after it ``ran``.

    With ``again`` the next action raises too: the first one of undoing. ``fired`` counts how often it has raised.
    """

    at: int
    ran: bool = False
    again: bool = False
    error: type[BaseException] = RuntimeError
    fired: int = 0
    _seen: int = 0

    @contextmanager
    def inside(self, actor: ActorLifecycle) -> Iterator[None]:
        world = actor._world
        perform = world.perform

        def sabotaged(action: Action, facts: Facts, call: Call) -> tuple[Any, int]:
            number = self._seen
            self._seen += 1
            if number != self.at and not (self.again and number == self.at + 1):
                return perform(action, facts, call)
            if self.ran:
                perform(action, facts, call)
            self.fired += 1
            raise self.error(f"injected into {action.do}")

        world.perform = sabotaged  # type: ignore[method-assign]
        try:
            yield
        finally:
            del world.perform  # the class has its own


class FlakyStore:
    """A ``HostStore`` in front of another one. While ``full`` names an error, every allocation raises it."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self.name, self.copy, self.shared = store.name, store.copy, store.shared
        self.full: type[Exception] | None = None
        self.refused = 0

    def allocate(self, nbytes: int) -> HostBuffer:
        if self.full is not None:
            self.refused += 1
            raise self.full(f"no room for {nbytes} bytes, as asked")
        return self._store.allocate(nbytes)

    def free(self, buffer: HostBuffer) -> None:
        self._store.free(buffer)

    def notes(self) -> tuple[str, ...]:
        return self._store.notes()

    def close(self) -> None:
        self._store.close()


class TightArena(ArenaBackend):
    """The arena on a machine that has ``room`` bytes, or as many as it really has."""

    room: int | None = None

    def available(self) -> int | None:
        return super().available() if self.room is None else self.room


class CopyingEngine(FakeEngine):
    """A fake engine that keeps weights of its own, like a real one: copied out of whatever transport it is given."""

    corrupts = False  # whether some of what it keeps is not what it was given

    def begin_update(self, manifest: UpdateManifest, transport: Transport) -> None:
        super().begin_update(manifest, transport)
        self.weights = {name: tensor.clone() for name, tensor in received(manifest, transport).items()}
        if self.corrupts:
            next(iter(self.weights.values())).add_(1)


def received(manifest: UpdateManifest, transport: Any) -> dict[str, Tensor]:
    """The tensors of an update, over the sender's memory."""
    if hasattr(transport, "tensors"):
        return dict(transport.tensors())
    segments = {s.id: mmap.mmap(s.fd, s.nbytes, prot=mmap.PROT_READ) for s in transport.segments if s.nbytes}
    return {sent.name: _over(sent, segments[sent.segment]) for sent in manifest.tensors}


def _over(sent: SentTensor, memory: mmap.mmap) -> Tensor:
    dtype = getattr(torch, sent.dtype)
    whole = torch.frombuffer(bytearray(memory), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(whole, sent.offset // dtype.itemsize, sent.shape, sent.stride)
