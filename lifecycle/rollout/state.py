"""What a rollout engine may do now: the table of ``states/rollout.py``, driven under one lock.

Theory of operation. Facts are read off what the engine has: its version, its open update, its pools, its pause and its
requests. An event is looked up in the table with the facts of this moment; its effects change what the engine has, and
the state follows. A request is accepted or refused in one such step; from then on it is among those accepted until it
is finished. A row that has to wait, for accepted requests to end or for memory to move, is *under way* meanwhile: no
request is accepted, other events wait for it, and what it changes is changed when the waiting is over. The version of
a request is the one held when it was accepted; it can not change under it, because every row that takes the version
away ends or forbids requests first.

Knows nothing about models, processes or bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, get_args

from attrs import define, field, frozen

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, PauseMode
from states.lookup import Found, Lookup, No
from states.rollout import METHODS, ROLLOUT, EngineFact

PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)

Outcome = list[dict[str, Any]] | EngineError

_LOOKUP = Lookup.of(ROLLOUT)
_FINAL = frozenset(state.name for state in ROLLOUT.states if state.final)


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


@frozen
class Asked:
    """One call, with what its effects and the conditions of its guards need."""

    event: str
    version: int | None = None
    mode: PauseMode | None = None
    missing: Collection[str] = ()
    reads_itself: bool = False


class EngineState:
    """Drives ROLLOUT for one engine. Methods raise EngineError, having changed nothing, or succeed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._at = ROLLOUT.initial
        self._moving: str | None = None
        self._mode: PauseMode | None = None
        self._version: int | None = None
        self._update: int | None = None
        self._released: set[str] = set()
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._do: dict[str, Callable[[Asked], None]] = {
            "close_admission": self._close_admission,
            "open_admission": self._open_admission,
            "end_requests": self._end_requests,
            "drop_version": self._drop_version,
            "open_update": self._open_update,
            "hold_version": self._hold_version,
            "close_update": self._close_update,
            "release_weights": lambda asked: self._release("weights"),
            "release_kv_cache": lambda asked: self._release("kv_cache"),
            "resume_weights": lambda asked: self._released.discard("weights"),
            "resume_kv_cache": lambda asked: self._released.discard("kv_cache"),
        }

    @property
    def state(self) -> str:
        """The declared state it is in; from any thread, never waiting."""
        return self._at

    @property
    def version(self) -> int | None:
        return self._version

    def facts(self) -> frozenset[EngineFact]:
        """The resource facts that are true now."""
        with self._changed:
            return self._facts()

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data, of one moment."""
        with self._changed:
            return {
                "state": self._at,
                "moving": self._moving,
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
        """Accept a request, or refuse it. Never waits: while a row is under way it is refused."""
        with self._changed:
            if self._moving is not None:
                raise EngineError(self.name, "generate", f"{self._moving} is under way. {self._told()}")
            self._row(Asked("generate"))
            assert self._version is not None
            request = Request(prompts, options, self._version, done)
            self._waiting.append(request)
            self._changed.notify_all()
            return request

    def take(self, wanted: Request | None = None) -> Request | None:
        """Wait for the next request to run (or for this one to be the next); None once stopped."""

        def ready() -> bool:
            if self._stopped():
                return True
            if self._running is not None or not self._waiting:
                return False
            head = self._waiting[0]
            return (wanted is None or head is wanted) and (self._mode != "keep" or head.aborted)

        with self._changed:
            self._changed.wait_for(ready)
            if self._stopped():
                return None
            self._running = self._waiting.popleft()
            return self._running

    def at_token(self, request: Request) -> bool:
        """Called between two tokens: stays in here while requests are kept. True when the request is to end now."""
        with self._changed:
            if self._mode == "keep":
                request.frozen = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._mode != "keep" or request.aborted)
                request.frozen = False
            return request.aborted

    def finish(self, request: Request) -> None:
        """The running request has ended, one way or another."""
        with self._changed:
            assert self._running is request
            if not self._waiting and self._moving is None:
                self._row(Asked("finish"))
            self._running = None
            self._changed.notify_all()

    def stop(self) -> None:
        """No further request is accepted or taken; the running one ends at its next token, waiting ones fail now."""
        with self._changed:
            found = self._row(Asked("stop"))
            for effect in found.effects:
                self._do[effect.name](Asked("stop", mode="abort"))
            self._at = found.target
            dropped, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for request in dropped:
            request.done(EngineError(self.name, "generate", "the engine is stopping"))

    # Pausing

    def pause(self, mode: PauseMode) -> None:
        """Close admission, then bring generation to rest; the last mode asked rules. See ``LocalEngine``."""
        if mode not in PAUSE_MODES:
            known = f"unknown mode {mode!r}; known: {', '.join(PAUSE_MODES)}"
            raise EngineError(self.name, "pause_generation", known)
        self._fire(Asked("pause_generation", mode=mode))
        with self._changed:
            self._changed.wait_for(lambda: self._mode is None or self._at_rest())
            if self._mode is None:
                continued = "generation was continued before it had come to rest"
                raise EngineError(self.name, "pause_generation", continued)

    def resume_generation(self) -> None:
        """Open admission again and let a frozen request go on."""
        self._fire(Asked("continue_generation"))

    def flush_cache(self) -> None:
        """Refused unless nothing runs; a frozen request does not count."""
        self._fire(Asked("flush_cache"))

    # Updates

    def check_update(self, version: int) -> None:
        """Refuse what ``open_update`` would refuse now."""
        with self._changed:
            self._settle()
            self._row(Asked("begin_update", version=version))

    def open_update(self, version: int) -> None:
        """From here on no version is held and none may generate. Frozen and kept requests end as aborted first."""
        self._fire(Asked("begin_update", version=version))

    def receive(self, *, reads_itself: bool = False) -> None:
        """One bucket of a pushed update may be written."""
        self._fire(Asked("receive", reads_itself=reads_itself))

    def check_weights(self) -> None:
        """Refused while there are no weights to be compared."""
        self._fire(Asked("check_weights"))

    def end_update(self, version: int, missing: Collection[str] = ()) -> None:
        """Hold this version. Refused unless it is the one of the open update and no name is ``missing``."""
        self._fire(Asked("end_update", version=version, missing=missing))

    def abort_update(self) -> None:
        """End every request and any update: no version, paused. Never refused."""
        self._fire(Asked("abort_update"))

    # Pools

    def release(self, pools: Collection[str], work: Callable[[str], None] = lambda pool: None) -> frozenset[str]:
        """Release pools; returns those that were resident. Weights take the version with them.

        ``work`` is called for each of them, before it counts as released; where it raises, the pool is still resident.
        """
        return self._each("release", pools, work)

    def resume(self, pools: Collection[str], work: Callable[[str], None] = lambda pool: None) -> frozenset[str]:
        """Resume pools; returns those that were released. ``work`` as in ``release``."""
        return self._each("resume", pools, work)

    def _each(self, method: str, pools: Collection[str], work: Callable[[str], None]) -> frozenset[str]:
        unknown = sorted(set(pools) - set(POOLS))
        if unknown:
            known = f"unknown pools {', '.join(unknown)}; known: {', '.join(POOLS)}"
            raise EngineError(self.name, method, known)
        named = [pool for pool in POOLS if pool in pools]
        with self._changed:
            self._settle()
            for pool in named:  # all or none
                self._row(Asked(f"{method}_{pool}"))
        fired = {pool: self._fire(Asked(f"{method}_{pool}"), partial(work, pool)) for pool in named}
        return frozenset(pool for pool, found in fired.items() if found.effects)

    # Rows

    def _fire(self, asked: Asked, work: Callable[[], None] | None = None) -> Found:
        """One event: look it up, work with no lock held, run its effects, move. Waits for a row under way first."""
        with self._changed:
            self._settle()
            found = self._row(asked)
            self._moving = asked.event
            try:
                if work is not None and found.effects:
                    self._unlocked(work)
                    self._require_unmoved(found, asked)
                for effect in found.effects:
                    if effect.name in self._do:  # the others change nothing here
                        self._do[effect.name](asked)
                        self._require_unmoved(found, asked)
                self._at = found.target
            finally:
                self._moving = None
                self._changed.notify_all()
        return found

    # All below is called with the lock held.

    def _unlocked(self, work: Callable[[], None]) -> None:
        self._changed.release()
        try:
            work()
        finally:
            self._changed.acquire()

    def _settle(self) -> None:
        self._changed.wait_for(lambda: self._moving is None)

    def _row(self, asked: Asked) -> Found:
        conditions = self._conditions(asked)
        found = _LOOKUP.find(self._at, asked.event, self._facts() | conditions.keys())
        if isinstance(found, Found):
            return found
        raise self._refusal(asked, found, conditions)

    def _require_unmoved(self, found: Found, asked: Asked) -> None:
        """``stop`` waits for nobody."""
        if self._at != found.row.source:
            raise EngineError(self.name, METHODS.get(asked.event, asked.event), "the engine is stopping")

    def _facts(self) -> frozenset[EngineFact]:
        true = {
            EngineFact.WEIGHTS_IN: "weights" not in self._released,
            EngineFact.KV_IN: "kv_cache" not in self._released,
            EngineFact.PAUSED: self._mode is not None,
            EngineFact.RECEIVING: self._update is not None,
            EngineFact.VERSION_HELD: self._version is not None,
            EngineFact.REQUESTS: not self._no_requests(),
        }
        return frozenset(fact for fact, holds in true.items() if holds)

    def _conditions(self, asked: Asked) -> dict[EngineFact, str]:
        """The conditions of this call that are true, with what a refusal by them adds to its reason."""
        found = {}
        if not self._at_rest():
            found[EngineFact.RUNNING] = ""
        if asked.version is not None:
            if self._version is not None and asked.version < self._version:
                found[EngineFact.OLDER] = f" (version {asked.version})"
            if asked.version != self._update:
                found[EngineFact.OTHER_VERSION] = f" (not {asked.version})"
        if asked.missing:
            found[EngineFact.NAMES_MISSING] = f": {', '.join(asked.missing)}"
        if asked.reads_itself:
            found[EngineFact.READS_ITSELF] = ""
        return found

    def _refusal(self, asked: Asked, no: No, conditions: dict[EngineFact, str]) -> EngineError:
        blamed = no.guard.forbids if no.guard is not None else frozenset()
        detail = "".join(text for fact, text in conditions.items() if fact in blamed)
        reason = f"{no.reason}{detail}. {no.advice} {self._told()}"
        return EngineError(self.name, METHODS.get(asked.event, asked.event), reason)

    def _told(self) -> str:
        """What it is, has, and takes now, in two sentences."""
        mode = f" ({self._mode})" if self._mode is not None else ""
        told = [f"State: {self._at}{mode}"]
        told.append("no version" if self._version is None else f"version {self._version}")
        if self._update is not None:
            told.append(f"the update to version {self._update} is open")
        if self._released:
            told.append(f"released: {', '.join(sorted(self._released))}")
        allowed = dict.fromkeys(METHODS.get(event, event) for event in _LOOKUP.allowed(self._at, self._facts()))
        return f"{', '.join(told)}. Allowed here: {', '.join(allowed)}."

    def _stopped(self) -> bool:
        return self._at in _FINAL

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

    # Effects

    def _close_admission(self, asked: Asked) -> None:
        self._mode = asked.mode or "abort"
        if self._mode == "abort":
            self._abort_requests()

    def _open_admission(self, asked: Asked) -> None:
        self._mode = None

    def _end_requests(self, asked: Asked) -> None:
        at = self._at
        self._abort_requests()
        self._changed.wait_for(lambda: self._no_requests() or self._at != at)

    def _drop_version(self, asked: Asked) -> None:
        self._version = None

    def _open_update(self, asked: Asked) -> None:
        self._update = asked.version

    def _hold_version(self, asked: Asked) -> None:
        self._version, self._update = self._update, None

    def _close_update(self, asked: Asked) -> None:
        self._update = None

    def _release(self, pool: str) -> None:
        self._released.add(pool)
        if pool == "weights":
            self._version = None
