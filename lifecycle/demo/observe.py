"""Looking at both processes from outside: states and memory, over time and at a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from attrs import frozen

from lifecycle.controller import ActorLifecycle
from lifecycle.errors import EngineError
from lifecycle.memory import pages
from lifecycle.rollout.local import LocalEngine

PERIOD = 0.1


@frozen
class Sample:
    """Both processes at one moment. Bytes are resident ones; ``host`` counts the host copies in shared memory."""

    time: float
    actor: str
    moving: tuple[str, str] | None
    trainer_bytes: int
    host_bytes: int
    engine: str
    engine_version: int | None
    engine_bytes: int


def engine_state(status: Mapping[str, Any]) -> str:
    """One word for what an engine's status says."""
    released = [name for name, pool in status["pools"].items() if pool["state"] == "released"]
    if status["update"] is not None:
        return "updating"
    if "weights" in released:
        return "released"
    if status["weight_version"] is None:
        return "empty"
    if status["paused"] is not None or released:
        return "waiting"
    return "generating" if status["requests"]["running"] else "ready"


def anonymous_bytes() -> int:
    """This process's anonymous resident memory, what the allocator holds for later returned first.

    Activations that were freed would otherwise count as memory given back by a sleep.
    """
    pages.trim()
    return pages.resident_anonymous()


def owned_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of weights (ties once), gradients and optimizer state, as they are now."""
    weights = list(model.parameters())
    grads = [weight.grad for weight in weights if weight.grad is not None]
    state = [value for held in optimizer.state.values() for value in held.values() if hasattr(value, "nbytes")]
    return sum(tensor.nbytes for tensor in (*weights, *grads, *state))


class Recorder:
    """Takes a sample every PERIOD seconds while it is entered. ``samples`` may be read from any thread."""

    def __init__(self, actor: ActorLifecycle, engine: LocalEngine) -> None:
        self.samples: list[Sample] = []
        self._actor, self._engine = actor, engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.samples.append(self._sample())  # what the last event left

    def _record(self) -> None:
        while not self._ended.wait(PERIOD):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        actor = self._actor
        state, version, nbytes = self._engine_now()
        return Sample(
            time.time(),
            str(actor.state),
            actor.moving,
            pages.resident_anonymous(),
            host_bytes(actor),
            state,
            version,
            nbytes,
        )

    def _engine_now(self) -> tuple[str, int | None, int]:
        try:
            status = self._engine.status()
        except EngineError:
            return "gone", None, 0
        return engine_state(status), status["weight_version"], status["memory"]["anon"]


def host_bytes(actor: ActorLifecycle) -> int:
    """Bytes of host buffers allocated so far; none is given back before the end."""
    return sum(record.nbytes for record in actor.journal if record.kind == "allocate")
