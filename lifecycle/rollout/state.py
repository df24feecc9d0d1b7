"""What a rollout engine may do now: one lock around its version, its pools, its pause and its requests.

Theory of operation. A request is *accepted* or refused in one atomic step together with the check of everything it
depends on; from then on it is among ``requests`` until it is finished. Whoever wants the engine still closes
admission first and then waits until no request is left (or the one that runs is frozen), so nothing can slip in
between. The version of a request is the one held when it was accepted; it can not change under it, because an update,
a release and an abort all end every request before they take the version away.

Knows nothing about models, processes or bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, get_args

from attrs import define, field

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, PauseMode

PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)

Outcome = list[dict[str, Any]] | EngineError


def _nobody(_: Outcome) -> None:
    return None


@define(eq=False)
class Request:
    """One accepted call of generate. ``done`` is told its outcome, once, from the thread that ran it."""

    prompts: list[list[int]]
    options: Any
    version: int
    done: Callable[[Outcome], None] = field(default=_nobody)
    aborted: bool = False
    frozen: bool = False


class EngineState:
    """Every check of an engine, under one lock. Methods raise EngineError, having changed nothing, or succeed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._mode: PauseMode | None = None
        self._version: int | None = None
        self._update: int | None = None
        self._released: set[str] = set()
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._stopped = False

    @property
    def version(self) -> int | None:
        return self._version

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data, of one moment."""
        with self._changed:
            return {
                "weight_version": self._version,
                "paused": self._mode,
                "update": self._update,
                "pools": {pool: "released" if pool in self._released else "resident" for pool in POOLS},
                "requests": {
                    "running": int(self._running is not None),
                    "frozen": int(self._running is not None and self._running.frozen),
                    "waiting": len(self._waiting),
                },
            }

    # Requests

    def admit(self, prompts: list[list[int]], options: Any, done: Callable[[Outcome], None] = _nobody) -> Request:
        """Accept a request, or refuse it: released, an update open, no version, or paused."""
        with self._changed:
            obstacle = self._why_not_generate()
            if obstacle is not None:
                raise self._refusal("generate", obstacle)
            assert self._version is not None
            request = Request(prompts, options, self._version, done)
            self._waiting.append(request)
            self._changed.notify_all()
            return request

    def take(self, wanted: Request | None = None) -> Request | None:
        """Wait for the next request to run (or for this one to be the next); None once stopped."""

        def ready() -> bool:
            if self._stopped:
                return True
            if self._running is not None or not self._waiting:
                return False
            head = self._waiting[0]
            return (wanted is None or head is wanted) and (self._mode != "keep" or head.aborted)

        with self._changed:
            self._changed.wait_for(ready)
            if self._stopped:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def at_token(self, request: Request) -> bool:
        """Called between two tokens: stays in here while requests are kept. True when the request is to end now."""
        with self._changed:
            if self._mode == "keep":
                request.frozen = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._mode != "keep" or request.aborted or self._stopped)
                request.frozen = False
            return request.aborted or self._stopped

    def finish(self, request: Request) -> None:
        """The running request has ended, one way or another."""
        with self._changed:
            assert self._running is request
            self._running = None
            self._changed.notify_all()

    def stop(self) -> None:
        """No further request is accepted or taken; the running one ends at its next token."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # Pausing

    def pause(self, mode: PauseMode) -> None:
        """Close admission, then bring generation to rest; the last mode asked rules. See ``LocalEngine``."""
        if mode not in PAUSE_MODES:
            raise self._refusal("pause_generation", f"unknown mode {mode!r}; known: {', '.join(PAUSE_MODES)}")
        with self._changed:
            self._mode = mode
            if mode == "abort":
                self._abort_requests()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._mode is None or self._at_rest())
            if self._mode is None:
                raise self._refusal("pause_generation", "generation was continued before it had come to rest")

    def resume_generation(self) -> None:
        """Open admission again and let a frozen request go on. Refused while an update is open."""
        with self._changed:
            if self._update is not None:
                raise self._refusal("continue_generation", self._update_open())
            self._mode = None
            self._changed.notify_all()

    def require_no_running_request(self, operation: str) -> None:
        """Refuse unless nothing runs; a frozen request does not count."""
        with self._changed:
            if not self._at_rest():
                raise self._refusal(operation, "a request runs: pause_generation first")

    # Updates

    def check_update(self, version: int) -> None:
        """Refuse what ``open_update`` would refuse now."""
        with self._changed:
            self._require_updatable(version)

    def open_update(self, version: int) -> None:
        """From here on no version is held and none may generate. Frozen and kept requests end as aborted first."""
        with self._changed:
            self._require_updatable(version)
            self._update = version
            self._abort_requests()
            self._changed.wait_for(self._no_requests)
            self._version = None

    def end_update(self, version: int) -> None:
        """Hold this version. Refused unless it is the one of the open update."""
        with self._changed:
            if self._update is None:
                raise self._refusal("end_update", "no update is open: begin_update first")
            if version != self._update:
                raise self._refusal("end_update", f"the open update is version {self._update}, not {version}")
            self._version, self._update = version, None

    def abort_update(self) -> None:
        """End every request and any update: no version, paused. Never refused."""
        with self._changed:
            self._mode, self._version = "abort", None
            self._abort_requests()
            self._changed.wait_for(self._no_requests)
            self._update = None

    # Pools

    def release(self, pools: Collection[str]) -> frozenset[str]:
        """Mark pools as released; returns those that were resident. Weights take the version with them."""
        self._require_known("release", pools)
        with self._changed:
            fresh = frozenset(pools) - self._released
            if fresh and self._update is not None:
                raise self._refusal("release", self._update_open())
            if fresh and not self._no_requests():
                raise self._refusal("release", "a request is not finished: pause_generation('abort' or 'wait') first")
            self._released |= fresh
            if "weights" in fresh:
                self._version = None
            return fresh

    def to_resume(self, pools: Collection[str]) -> frozenset[str]:
        """Which of these pools are released."""
        self._require_known("resume", pools)
        with self._changed:
            return frozenset(pools) & self._released

    def resumed(self, pools: Collection[str]) -> None:
        with self._changed:
            self._released -= frozenset(pools)

    def require_weights(self, operation: str) -> None:
        """Refuse while the weights pool is released."""
        with self._changed:
            if "weights" in self._released:
                raise self._refusal(operation, "the weights pool is released: resume(('weights',)) first")

    # All below is called with the lock held.

    def _refusal(self, operation: str, reason: str) -> EngineError:
        return EngineError(self.name, operation, reason)

    def _update_open(self) -> str:
        return f"the update to version {self._update} is open: end_update or abort_update first"

    def _why_not_generate(self) -> str | None:
        if self._stopped:
            return "the engine is stopping"
        if self._released:
            names = ", ".join(sorted(self._released))
            return f"released: {names}; resume them, and sync weights that were released"
        if self._update is not None:
            return self._update_open()
        if self._version is None:
            return "it holds no version of the weights: sync first"
        if self._mode is not None:
            return f"paused ({self._mode}): continue_generation first"
        return None

    def _require_updatable(self, version: int) -> None:
        self.require_weights("begin_update")
        if self._update is not None:
            raise self._refusal("begin_update", self._update_open())
        if self._version is not None and version < self._version:
            raise self._refusal(
                "begin_update",
                f"it holds version {self._version}, and version {version} is older: abort_update() or "
                "release(('weights',)) lets go of the newer one",
            )
        self.require_no_running_request("begin_update")

    def _require_known(self, operation: str, pools: Collection[str]) -> None:
        unknown = sorted(set(pools) - set(POOLS))
        if unknown:
            raise self._refusal(operation, f"unknown pools {', '.join(unknown)}; known: {', '.join(POOLS)}")

    def _abort_requests(self) -> None:
        for request in (*self._waiting, *([self._running] if self._running else [])):
            request.aborted = True
        self._changed.notify_all()

    def _no_requests(self) -> bool:
        return self._running is None and not self._waiting

    def _at_rest(self) -> bool:
        if self._mode == "keep":
            return self._running is None or self._running.frozen
        return self._no_requests()
