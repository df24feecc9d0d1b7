"""Syncing a driven actor with engines that fail on request, and what must have come of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from lifecycle.errors import EngineError, SyncFailed, TransitionRefused
from lifecycle.testing.driving import Driver
from lifecycle.testing.subjects import different_names
from lifecycle.testing.trouble import CopyingEngine, Fault
from lifecycle.versions import ACTOR

Rotation = tuple[tuple[str, str], ...]
METHODS = (
    "pause_generation",
    "flush_cache",
    "begin_update",
    "check_weights",
    "end_update",
    "continue_generation",
    "abort_update",
)


@frozen
class EngineTrouble:
    """In this method the first (0) or last (-1) engine fails or dies; or it ``corrupts`` what it was given."""

    method: str
    victim: int = 0
    kind: Literal["fails", "dies", "corrupts"] = "fails"

    def cause(self, engine: CopyingEngine) -> None:
        if self.kind == "corrupts":
            engine.corrupts = True
        else:
            (engine.die_on if self.kind == "dies" else engine.fail_on).add(self.method)


class Syncing(Driver):
    """``sync``, in every state."""

    def sync(
        self,
        tag: str,
        names: str = "ab",
        rotate: Rotation = (),
        trouble: EngineTrouble | None = None,
        restart: bool = False,
        fault: Fault | None = None,
    ) -> None:
        """To engines "a" (in this process) and "b" (shared memory). ``restart`` those that died or hold a newer one."""
        engines = {name: self.engines[name] for name in names}
        for engine in engines.values():
            if restart and (not engine.alive or (engine.weight_version or 0) > self.actor.tags[tag]):
                engine.restart()
        if not self.finish_leftover(engines):
            return
        version, before, moved = self.actor.tags[tag], self.seen(), self.moved()
        held = {name: self.held(engine) for name, engine in engines.items()}
        if trouble is not None:
            trouble.cause(engines[names[trouble.victim]])
        sick = any(engine.fail_on or engine.die_on or engine.corrupts for engine in engines.values())
        error = self.attempt(lambda: self.actor.sync(list(engines.values()), tag, rotate), fault)
        for engine in self.engines.values():
            engine.fail_on, engine.die_on, engine.corrupts = set(), set(), False
            engine.calls.clear()  # they hold transports, and these the actor's tensors
        if error is None:
            assert self.may("sync")
            assert not self.rotates_shown(rotate, before["tags"])
            self.synced(tag, version, engines, rotate)
            return
        unreachable = "b" in names and not self.store.shared
        if unreachable or not self.may("sync") or self.rotates_shown(rotate, before["tags"]):
            assert isinstance(error, EngineError if unreachable else TransitionRefused), error
            assert (self.seen(), self.moved()) == (before, moved)
            assert held == {name: self.held(engine) for name, engine in engines.items()}
            return
        failing = sick or not all(engine.alive for engine in engines.values())
        newer = any(holds is not None and holds > version for holds, _ in held.values())
        if not (failing or newer or self.hit(fault)):
            raise error
        self.possible = {name: [self.expected.weights[of], self.expected.weights[ACTOR]] for name, of in rotate}
        self.sync_failed(error, engines, held, before, fault, failing or newer)

    def finish_leftover(self, engines: Mapping[str, CopyingEngine]) -> bool:
        """End what an earlier step left open, that the sync may be told apart from it."""
        if not self.expected.leftover:
            return True
        if self.settle():
            self.actor.wake_up()
            return True
        error = self.attempt(lambda: self.actor.sync(list(engines.values())))
        assert isinstance(error, TransitionRefused | EngineError), error
        return False

    def rotates_shown(self, rotate: Rotation, tags: Mapping[str, int]) -> bool:
        moved = dict(tags)
        for name, of in rotate:
            moved[name] = moved[of]
        return any(moved[tag] != tags[tag] for tag in {ACTOR, self.expected.shown or ACTOR})

    def held(self, engine: CopyingEngine) -> tuple[int | None, bool]:
        """Its version and whether it is paused."""
        return engine.weight_version, engine._state.snapshot()["paused"] is not None

    def synced(self, tag: str, version: int, engines: Mapping[str, CopyingEngine], rotate: Rotation) -> None:
        expected = self.expected
        expected.published = version
        for engine in engines.values():
            assert self.held(engine) == (version, False)
            assert not different_names(engine.weights, expected.weights[tag])
        expected.copied |= "b" in engines and tag == expected.shown
        for name, of in rotate:
            expected.weights[name] = expected.weights[of]

    def sync_failed(
        self,
        error: BaseException,
        engines: Mapping[str, CopyingEngine],
        held: Mapping[str, tuple[int | None, bool]],
        before: dict[str, Any],
        fault: Fault | None,
        twice: bool,
    ) -> None:
        """Nothing is published. Every engine goes on with what it had, or holds no version and stays paused.

        ``twice``: an engine would have failed too, so that the fault may have hit the undoing.
        """
        if self.hit(fault):
            self.stopped(error, before, fault, final=twice)
            if self.faulted:
                return
        else:
            assert isinstance(error, SyncFailed), error
            assert error.outcomes.keys() == engines.keys()
            assert self.seen() == before
        self.possible = {}
        for name, engine in engines.items():
            known = self.actor.facts.engines.get(name)
            assert known is None or engine.weight_version in (None, known)
            if engine.alive and engine.weight_version is not None and known is not None:
                version, paused = self.held(engine)
                assert version == held[name][0]
                assert held[name][1] or not paused  # one that an earlier failure left paused may go on now
