"""One actor and its engines on one device, under the rules of ``states/joint.py``: out before in.

Theory of operation. Who holds memory is asked, never remembered: the actor's memory backend says which regions are
mapped, each engine's ``status`` which pools. What can not be known counts as held: by an engine that does not answer,
by one whose ``resume`` failed or never returned (it may still be at it), by a faulted actor. So a refusal may be too
careful, and no move is too early. Every step of the two moves may be repeated: one that stopped is called again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from lifecycle.errors import EngineError, MoveStopped, TransitionRefused
from lifecycle.rollout.base import POOLS, PauseMode, RolloutEngine
from lifecycle.rollout.facts import facts_told
from lifecycle.versions import ACTOR
from states.joint import COLOCATED, JointRule, JointSpec
from states.lookup import Found, Lookup
from states.resources import AnyFact, Fact, Region
from states.rollout import EngineFact
from states.spec import Row

if TYPE_CHECKING:
    from lifecycle.controller import ActorLifecycle, SyncReport

_POOL_FACTS = {"weights": EngineFact.WEIGHTS_IN, "kv_cache": EngineFact.KV_IN}
_REGION_FACTS = {region: Fact[region.name] for region in (Region.WEIGHTS, Region.OPTIMIZER, Region.REST)}
_HELD = {**{fact: region.value for region, fact in _REGION_FACTS.items()}, Fact.GRADS: Region.GRADS.value} | {
    fact: pool for pool, fact in _POOL_FACTS.items()
}

_EVERYTHING = frozenset(_POOL_FACTS.values())
_LOOK_SECONDS = 10.0  # an engine answers ``status`` at once, or is not well

Answer = TypeVar("Answer")


@frozen
class ColocatedState:
    """Where everything is. ``name``: TRAINING (the actor alone has memory), ROLLOUT (all engines are whole and awake,
    the actor is out), or BETWEEN. ``holders``: who has memory, and what; "unknown" counts as everything."""

    name: str
    actor: str
    engines: Mapping[str, str]
    holders: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        members = {"actor": self.actor, **self.engines}
        told = (f"{name} {state}, holds {_listed(self.holders.get(name, ()))}" for name, state in members.items())
        return f"{self.name} ({'; '.join(told)})"


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"


@frozen
class _Engine:
    """What is known of one engine now. ``state`` is "unknown" where it could not be asked."""

    state: str
    facts: frozenset[EngineFact]
    holds: frozenset[AnyFact]
    why: str = ""


class Colocated:
    """Moves memory between one actor and its engines on one device. Usable from several threads; one move at a time.

    Refused with TransitionRefused while both have memory: sleep the actor, or release the engines, first. Sleeping the
    actor directly is fine; for waking it, and for resuming engines, ask here. ``timeout``: seconds that an engine has
    for one answer; after it nobody knows what it did.
    """

    def __init__(
        self,
        actor: ActorLifecycle,
        engines: RolloutEngine | Sequence[RolloutEngine],
        *,
        timeout: float = 600.0,
        joint: JointSpec = COLOCATED,
    ) -> None:
        several = list(engines) if isinstance(engines, Sequence) else [engines]
        self.actor, self.engines = actor, {engine.name: engine for engine in several}
        if not several or len(self.engines) != len(several):
            raise ValueError(f"engines={[e.name for e in several]}: give at least one, each with a name of its own")
        self._timeout, self._joint = timeout, joint
        self._lookup = Lookup.of(joint.member("rollout"))
        self._doubted: dict[str, frozenset[str]] = {}  # pools that an engine may be about to map
        self._moving = threading.RLock()
        held = self.holders()
        if "actor" in held and len(held) > 1:
            both = f"both have memory of this device: {_told(held)}"
            raise TransitionRefused("colocate", str(self.state), (), both, "Sleep the actor or release the engines.")

    def __repr__(self) -> str:
        return f"<Colocated {self.state}>"

    # what is

    @property
    def state(self) -> ColocatedState:
        """Asked anew at every call."""
        engines = self._look()
        held = self._held(engines)
        whole = engines and all(
            seen.state == "AWAKE" and EngineFact.VERSION_HELD in seen.facts for seen in engines.values()
        )
        alone = "actor" in held and len(held) == 1 and self.actor.state.name in ("RESIDENT", "SWITCHED")
        name = "TRAINING" if alone else "ROLLOUT" if whole and "actor" not in held else "BETWEEN"
        states = {name: seen.state + (f" ({seen.why})" if seen.why else "") for name, seen in engines.items()}
        return ColocatedState(name, str(self.actor.state), states, held)

    def holders(self) -> dict[str, tuple[str, ...]]:
        """Who has memory of the device: ``actor`` or an engine's name, with the regions or pools."""
        return self._held(self._look())

    def device_taken(self) -> str | None:
        """Who but the actor has memory of the device, in words; None where it is free for the actor."""
        held = {name: what for name, what in self.holders().items() if name != "actor"}
        return _told(held) if held else None

    # one side at a time

    def sleep(self) -> None:
        """``actor.sleep``."""
        with self._moving:
            self.actor.sleep()

    def wake_up(self, tag: str = ACTOR) -> None:
        """``actor.wake_up``, refused while an engine has memory, or may have."""
        with self._moving:
            held = {name: seen.holds for name, seen in self._look().items()}
            for row in self._wake_rows(tag):
                for rule in self._joint.rules_for("actor", row):
                    self._require("wake_up", rule, held)
            self.actor.wake_up(tag)

    def release(self, pools: Collection[str] = POOLS) -> dict[str, dict[str, Any]]:
        """Release pools of every engine; returns what each says of its pools once all of them have answered.

        Raises MoveStopped where one refused, failed, or did not answer: those that were released stay so.
        """
        with self._moving:
            return self._move("release", pools, "release")

    def resume(self, pools: Collection[str] = POOLS) -> dict[str, dict[str, Any]]:
        """Resume pools of every engine, refused while the actor has memory. Otherwise as ``release``."""
        with self._moving:
            return self._move("resume", pools, "resume")

    def forget(self, engine: str) -> None:
        """The engine is gone, and its memory with it: the caller has made sure. It takes no further part."""
        with self._moving:
            if engine not in self.engines:
                raise ValueError(f"unknown engine {engine!r}; known: {', '.join(self.engines)}")
            del self.engines[engine]
            self._doubted.pop(engine, None)

    # the two moves

    def to_training(self, tag: str = ACTOR, pause_mode: PauseMode = "abort") -> None:
        """Engines pause and release everything, then the actor wakes up.

        Raises MoveStopped where it stops half-way: it says where everything is. Call it again to go on.
        """
        with self._moving:
            if not self._wake_rows(tag) and (refusal := self.actor.plan("wake_up", tag).refusal) is not None:
                raise refusal  # however much memory is free
            self._every("to_training", "pause_generation", lambda engine: engine.pause_generation(pause_mode))
            self._move("release", POOLS, "to_training")
            self._step("to_training", "wake_up", lambda: self.wake_up(tag))

    def to_rollout(self, sync: bool = True, **options: Any) -> SyncReport | None:
        """The actor sleeps, engines take weights, then their caches, and generate. ``options`` are those of ``sync``.

        Without ``sync`` they generate with what they hold: released weights are lost, so then only engines that
        released no more than their caches will. Raises what ``sleep`` raises, nothing having moved, and MoveStopped
        where it stops later. Call it again to go on, or ``to_training`` to go back.
        """
        with self._moving:
            self.actor.sleep()
            self._move("resume", ("weights",), "to_rollout")
            report = None
            if sync:
                engines = list(self.engines.values())
                report = self._step("to_rollout", "sync", lambda: self.actor.sync(engines, **options))
            self._move("resume", ("kv_cache",), "to_rollout")
            self._every("to_rollout", "continue_generation", lambda engine: engine.continue_generation())
            return report

    # asking

    def _look(self) -> dict[str, _Engine]:
        told, errors = _ask_all(self.engines, lambda engine: engine.status(), min(self._timeout, _LOOK_SECONDS))
        seen = {name: _Engine("unknown", frozenset(), _EVERYTHING, _reason(error)) for name, error in errors.items()}
        for name, status in told.items():
            facts, doubted = facts_told(status), self._doubted.get(name, frozenset())
            holds = facts & _EVERYTHING | {_POOL_FACTS[pool] for pool in doubted}
            why = f"its resume of {_listed(sorted(doubted))} did not end well" if doubted else ""
            seen[name] = _Engine(status["state"], facts, frozenset(holds), why)
        return {name: seen[name] for name in self.engines}

    def _actor_holds(self) -> frozenset[AnyFact]:
        """What it has mapped of the regions that a sleep releases; all of them where nobody knows."""
        if self.actor.state.name == "FAULTED":
            return frozenset({*_REGION_FACTS.values(), Fact.GRADS})
        mapped = self.actor.memory.resident() - self.actor.config.keep
        return frozenset(fact for region, fact in _REGION_FACTS.items() if region in mapped)

    def _held(self, engines: Mapping[str, _Engine]) -> dict[str, tuple[str, ...]]:
        return _words({"actor": self._actor_holds(), **{name: seen.holds for name, seen in engines.items()}})

    # moving

    def _move(self, event: str, pools: Collection[str], move: str) -> dict[str, dict[str, Any]]:
        """Release or resume pools of every engine; returns what each says of them once all have answered."""
        if unknown := sorted(set(pools) - set(POOLS)):
            raise ValueError(f"unknown pools {', '.join(unknown)}; known: {', '.join(POOLS)}")
        pools = frozenset(pools)
        if event == "resume":
            # Under the actor's lock: one that wakes up in another thread either has begun, or sees that we have.
            with self.actor._exclusive(move):
                self._require_resumable(move, pools)
                self._doubt({name: self._doubted.get(name, frozenset()) | pools for name in self.engines})
        wanted = "released" if event == "release" else "resident"

        def act(engine: RolloutEngine) -> dict[str, Any]:
            (engine.release if event == "release" else engine.resume)(tuple(pool for pool in POOLS if pool in pools))
            told: dict[str, Any] = engine.status()["pools"]
            if wrong := [pool for pool in POOLS if pool in pools and told[pool]["state"] != wanted]:
                raise EngineError(engine.name, event, f"it says that {_listed(wrong)} is not {wanted}")
            return told

        answers, errors = _ask_all(self.engines, act, self._timeout)
        self._doubt({name: told - pools if name in answers else told for name, told in self._doubted.items()})
        if errors:
            raise self._stopped(move, f"{event} of {_listed(sorted(pools))}", errors)
        return answers

    def _doubt(self, doubted: Mapping[str, frozenset[str]]) -> None:
        self._doubted = {name: pools for name, pools in doubted.items() if pools}

    def _require_resumable(self, move: str, pools: Collection[str]) -> None:
        """Refuse where a rule forbids what an engine would do; one that can not be asked might do anything."""
        for seen in self._look().values():
            for pool in pools:
                found = self._lookup.find(seen.state, f"resume_{pool}", seen.facts)
                rows = [found.row] if isinstance(found, Found) else []
                if seen.state == "unknown":
                    rows = [row for row in self._lookup.spec.rows if row.event == f"resume_{pool}"]
                for rule in (rule for row in rows for rule in self._joint.rules_for("rollout", row)):
                    self._require(move, rule, {"actor": self._actor_holds()})

    def _wake_rows(self, tag: str) -> list[Row]:
        actor = self.actor
        return [flat.row for flat in actor._table.candidates("wake_up", actor._machine.state, tag)]

    def _require(self, event: str, rule: JointRule, held: Mapping[str, frozenset[AnyFact]]) -> None:
        if bad := _words({name: facts & rule.forbids for name, facts in held.items()}):
            allowed = ("sleep", "release", "to_training", "to_rollout")
            raise TransitionRefused(event, str(self.state), allowed, f"{rule.reason}: {_told(bad)}", rule.advice)

    def _every(self, move: str, step: str, act: Callable[[RolloutEngine], None]) -> None:
        """Ask all engines at once, and wait until all have answered; MoveStopped where one could not."""
        _, errors = _ask_all(self.engines, act, self._timeout)
        if errors:
            raise self._stopped(move, step, errors)

    def _step(self, move: str, step: str, act: Callable[[], Answer]) -> Answer:
        try:
            return act()
        except Exception as error:
            raise self._stopped(move, step, {"actor": error}) from error

    def _stopped(self, move: str, step: str, errors: Mapping[str, Exception]) -> MoveStopped:
        back = {"to_training": ", or to_rollout() to go back", "to_rollout": ", or to_training() to go back"}
        advice, state = f"Call {move}() again to go on{back.get(move, '')}.", self.state
        if lost := [name for name, text in state.engines.items() if text.startswith("unknown")]:
            advice += f" If {_listed(lost)} is gone for good, restart it, or forget() it."
        stopped = MoveStopped(move, step, {n: _reason(error) for n, error in errors.items()}, str(state), advice)
        stopped.__cause__ = next(iter(errors.values()))
        return stopped


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _words(held: Mapping[str, Collection[AnyFact]]) -> dict[str, tuple[str, ...]]:
    """Those who hold something, with the names of the regions or pools."""
    return {name: tuple(text for fact, text in _HELD.items() if fact in facts) for name, facts in held.items() if facts}


def _told(held: Mapping[str, Collection[str]]) -> str:
    return "; ".join(f"{name} ({_listed(what)})" for name, what in held.items())


def _ask_all(
    engines: Mapping[str, RolloutEngine], act: Callable[[RolloutEngine], Answer], timeout: float
) -> tuple[dict[str, Answer], dict[str, Exception]]:
    """Answers and errors, by engine. One that does not answer in time is an error, and is left to itself."""
    answers: dict[str, Answer] = {}
    errors: dict[str, Exception] = {}

    def ask(engine: RolloutEngine) -> None:
        try:
            answers[engine.name] = act(engine)
        except Exception as error:
            errors[engine.name] = error

    threads = {name: threading.Thread(target=ask, args=[engine], daemon=True) for name, engine in engines.items()}
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + timeout
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            late = f"no answer within {timeout:g} s; it may still be at it"
            errors[name] = EngineError(name, "ask", late)
    known = dict(errors)
    return {name: answers[name] for name in engines if name in answers and name not in known}, known
