"""One event, from lock to commit: what every event of the controller has in common.

Theory of operation. Every event goes through ``_step``: find the row and preview its plan (pure), let the running
machine fire it with the executor in between, commit or report. One event runs at a time: another thread's is refused
or waits, one fired from inside an effect is refused, and SIGINT is held back until the event has ended one way or the
other. Facts and state are published as plain attributes and may be read from any thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from attrs import evolve

from lifecycle import versions as v
from lifecycle.actions import Call
from lifecycle.asking import asked_once
from lifecycle.errors import EffectFailed, Faulted, LifecycleError, TransitionRefused, UnknownTag
from lifecycle.executor import EffectStopped, Executor, Failure, interrupts_held
from lifecycle.journal import Kind
from lifecycle.machine import RunningMachine
from lifecycle.plan import ActorState, Table, find_row, first_event, holds, preview
from lifecycle.references import prune
from lifecycle.versions import Facts, Load, Phase
from lifecycle.world import World
from states.resources import VERSION_SLOTS, AnyFact, Region
from states.spec import FlatRow

_NOBODY = 0
_PATIENCE = 0.1  # seconds of waiting for another thread's event between two looks for Ctrl-C


class Steps:
    """Holds the table, the world, the facts and the running machine of one actor, and runs its events."""

    def __init__(self, table: Table, world: World, facts: Facts) -> None:
        self.config, self.journal = world.config, world.journal
        self._table, self._world = table, world
        self._executor = Executor(world, world.journal, facts, {effect.name: effect for effect in table.spec.effects})
        self._machine = RunningMachine(table)
        self._lock, self._owner, self._pid = threading.Lock(), _NOBODY, os.getpid()
        self._fault_effect = ""
        self._guarded = self._awaited = False

    @property
    def state(self) -> ActorState:
        """The committed state; from any thread, never waiting."""
        state = self._table.states[self._machine.state]
        if state.name == "FAULTED":
            return evolve(state, effect=self._fault_effect)
        return evolve(state, arriving=True) if self.facts.arriving else state

    @property
    def moving(self) -> tuple[str, str] | None:
        """(event, effect) while an effect runs, else None; from any thread, never waiting."""
        return self._executor.moving

    @property
    def facts(self) -> Facts:
        """Everything the controller knows, as one frozen value."""
        return self._executor.facts

    def _known(self, event: str, tag: str) -> None:
        if tag not in self.facts.tags:
            raise UnknownTag(event, str(self.state), tag, self.facts.tags)

    def _call(self, event: str, **arguments: Any) -> Call:
        config = self.config
        return Call(
            event,
            self._executor.facts,
            self._table.shown[self._machine.state],
            keep=config.keep if config.drop_workspaces else config.keep | {Region.WORKSPACES},
            verify=config.verify != "never",
            restore_aborted=config.on_abort == "restore",
            **arguments,
        )

    @contextmanager
    def _exclusive(self, event: str, wait: bool = False) -> Iterator[None]:
        """One event at a time, in the process that attached the actor; SIGINT is held back, but not from waiting."""
        if os.getpid() != self._pid:
            self._refuse(event, f"this process was forked from {self._pid}, which owns the actor")
        if self._owner == threading.get_ident():
            self._refuse(event, f"asked from inside {self.moving or 'an event'}", "Ask again when that has ended.")
        with interrupts_held() as deliver:
            while not self._lock.acquire(timeout=_PATIENCE if wait or self.config.when_busy == "wait" else 0):
                if not wait and self.config.when_busy == "refuse":
                    self._refuse(event, f"another thread is in {self.moving or 'an event'}", "Or set when_busy='wait'.")
                deliver()
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = _NOBODY
                self._lock.release()

    def _refuse(self, event: str, reason: str, advice: str = "") -> NoReturn:
        raise TransitionRefused(event, str(self.state), (), reason, advice)

    def _fire(self, event: str, **arguments: Any) -> None:
        with self._exclusive(event):
            self._step(event, **arguments)

    def _step(self, event: str, **arguments: Any) -> None:
        """One event, start to commit. The caller holds the lock."""
        if event not in ("end_training", "abort_training") and self._left_over():
            self._step("abort_training")
        world, margin = self._world, self.config.memory_margin_bytes
        source = self._machine.state
        while self.facts.arriving:
            first = first_event(self._table, source, self.facts, self._call(event, **arguments), world, margin)
            if first is None:
                break
            self._step(first)
        call, asked = self._call(event, **arguments), asked_once(world)
        row = find_row(self._table, source, call.before, call, asked, margin)
        if isinstance(row, TransitionRefused):
            raise self._told_where(row)
        began = time.perf_counter()
        try:
            with self._executor.foreseen(row, call, asked):
                planned = preview(row, call.before, call, asked, world.settings())
                self._machine.fire(row, lambda: self._executor.run(row, call, planned))
        except EffectStopped as stop:
            self._stopped(row, call, stop.failure)
        self._commit(row, call, time.perf_counter() - began)

    def _left_over(self) -> bool:
        """Whether an implicit phase is open: its step raised, and whatever comes next aborts it."""
        phase = self.facts.phase
        return phase is not None and phase.implicit and self._answers("abort_training")

    def _answers(self, event: str) -> bool:
        """Whether the table has a row for this event, without a tag, in the present state."""
        return bool(self._table.candidates(event, self._machine.state, None))

    def _at_rest(self) -> bool:
        """Not between the two halves of a sync."""
        return self._table.states[self._machine.state].origin is None

    def _told_where(self, refusal: TransitionRefused) -> TransitionRefused:
        if isinstance(refusal, Faulted):
            return Faulted(refusal.event, self._fault_effect, v.lost_tags(self.facts))
        return refusal

    def _commit(self, row: FlatRow, call: Call, seconds: float) -> None:
        if self._executor.facts is not call.before:
            self._forget_unreferenced()
            self._guard_forward()
            self._guard_arriving()
        shown = self._table.shown[row.target]
        version = None if shown is None else self.facts.tags[shown]
        self.journal.add(
            "commit",
            call.event,
            tag=call.tag,
            source=self._table.names[row.source],
            target=str(self.state),
            version=version,
            seconds=seconds,
        )

    def _stopped(self, row: FlatRow, call: Call, failure: Failure) -> None:
        """An effect raised and was unwound, or not: raise what the caller must know."""
        self._forget_unreferenced()
        kind: Kind = "unwind" if failure.rolled_back else "fault"
        note = f"{type(failure.cause).__name__}: {failure.cause}"
        source = self._table.names[row.source]
        self.journal.add(kind, call.event, tag=call.tag, effect=failure.effect, source=source, note=note)
        if not failure.rolled_back:
            self._fault(row.source, failure.effect)
        cause, state = failure.cause, str(self.state)
        if not isinstance(cause, Exception):
            cause.add_note(f"{call.event}: stopped in effect {failure.effect}; state: {state}")
            raise cause
        if call.event == "recover":
            raise Faulted("recover", failure.effect, v.lost_tags(self.facts)) from cause
        if failure.rolled_back and isinstance(cause, LifecycleError):
            raise cause
        raise EffectFailed(call.event, failure.effect, cause, failure.rolled_back, state) from cause

    def _fault(self, source: str, effect: str) -> None:
        self._fault_effect = effect
        (row,) = self._table.candidates("fault", source, None)
        self._machine.fire(row, lambda: None)
        self._guard_forward()
        self._guard_arriving()

    def _forget_unreferenced(self) -> None:
        self._executor.facts = prune(self._executor.facts)
        self._world.free_unreferenced(self._executor.facts)

    def _guard_forward(self) -> None:
        """Hooks on forward stand exactly while none is allowed: the weights are released, or the state forbids it."""
        released = Region.WEIGHTS not in self.facts.resident or self._machine.state in self._table.no_forward
        if released != self._guarded:
            self._world.adapter.guard_released(released)
            self._guarded = released

    def _guard_arriving(self) -> None:
        """Hooks make forwards wait exactly while weights are on their way."""
        arriving = any(slot in self.facts.arriving for slot in VERSION_SLOTS)
        if arriving or self._awaited:
            self._world.guard_arriving(arriving)
            self._awaited = arriving

    def _arrive(self) -> None:
        """Wait for everything that is on its way. The caller holds the lock."""
        for fact, event in self._table.firsts.items():
            if self.facts.arriving and self._holds(fact):
                self._step(event)

    def _holds(self, fact: AnyFact) -> bool:
        """Conditions of which no row has a say."""
        return holds(fact, self.facts, Call("", self.facts), self._table.all_rows[0], self._world)

    @contextmanager
    def _block(
        self, begin: str, end: str, abort: str, of: Callable[[Facts], Phase | Load | None], **arguments: Any
    ) -> Iterator[None]:
        """A with-block from ``begin`` to ``end``. What it opened it ends, also where an interrupt came right after
        ``begin``; the first exception is the one that is raised."""
        before = of(self.facts)
        try:
            self._fire(begin, **arguments)
            yield
            self._fire(end)
        except BaseException as error:
            now = of(self.facts)
            if now is not None and (before is None or now.version != before.version):
                try:
                    self._fire(abort)
                except LifecycleError as second:
                    error.add_note(f"{abort} failed too: {second}")
            raise
