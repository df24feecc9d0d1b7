"""The controller: one actor's life cycle, behind the public interface.

Theory of operation. Every event goes through ``_step``: find the row and preview its plan (pure), let the running
machine fire it with the executor in between, commit or report. One event runs at a time: another thread's is refused
or waits, one fired from inside an effect is refused, and SIGINT is held back until the event has ended one way or the
other. Facts and state are published as plain attributes and may be read from any thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import evolve, frozen

from lifecycle import versions as v
from lifecycle.adapters.base import Adapter
from lifecycle.attach import make_adapter, make_backend, make_store, refuse_second_attach
from lifecycle.config import LifecycleConfig
from lifecycle.errors import (
    EffectFailed,
    Faulted,
    LifecycleError,
    SyncFailed,
    TransitionRefused,
    UnknownTag,
)
from lifecycle.executor import EffectStopped, Executor, Failure, Traffic, interrupts_held
from lifecycle.hoststore.base import HostStore
from lifecycle.journal import Journal, Kind
from lifecycle.machine import RunningMachine
from lifecycle.manifest import Manifest
from lifecycle.memory.base import MemoryBackend
from lifecycle.plan import ActorState, Plan, Table, allowed_events, find_row, holds, make_plan, preview
from lifecycle.rollout.base import PauseMode, RolloutEngine
from lifecycle.sync.session import SyncSession
from lifecycle.versions import ACTOR, Facts, Load, Phase, Scope, Version
from lifecycle.work import Call
from lifecycle.world import World
from states.actor import ACTOR as ACTOR_SPEC
from states.resources import Copy, Fact, Region
from states.spec import FlatRow

if TYPE_CHECKING:
    from torch import Tensor

_ATTACHED: WeakSet[ActorLifecycle] = WeakSet()
_NOBODY = 0
_PATIENCE = 0.1  # seconds of waiting for another thread's event between two looks for Ctrl-C


@frozen
class SyncReport:
    """What a sync did. ``outcomes`` maps engine to "updated"; a sync that is not whole raises SyncFailed instead."""

    version: int
    nbytes: int
    seconds: float
    source: Copy
    outcomes: Mapping[str, str]
    transports: Mapping[str, str]


class ActorLifecycle:
    """The life cycle of one training actor.

    ``model`` is an ``nn.Module`` or a sequence of them, ``optimizer`` a ``torch.optim.Optimizer``, a sequence of them
    or None. ``tags`` are names for further versions beside ``actor``; at first all point at the weights attached.
    ``extra`` names plain tensor attributes (dotted paths, patterns, or (name, module) pairs) that the actor owns too,
    ``waive`` those that it shall leave alone. ``memory`` and ``host`` choose a memory backend and a host store by
    name, or are one. Raises ManifestError when something is owned by nobody or by two, and ValueError for bad
    settings.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        tags: Iterable[str] = (),
        memory: str | MemoryBackend = "auto",
        host: str | HostStore = "auto",
        config: LifecycleConfig | None = None,
        *,
        extra: Sequence[Any] = (),
        waive: Sequence[str] = (),
        adapter: Adapter | None = None,
    ) -> None:
        self.config = config or LifecycleConfig()
        self._table = Table.of(ACTOR_SPEC, (ACTOR, *_checked_tags(tags)))
        backend, store = make_backend(memory), make_store(host)
        adapter = adapter or make_adapter(model, optimizer, extra, waive)
        refuse_second_attach(adapter, [actor._world.attached for actor in _ATTACHED])
        self.journal = Journal(self.config.journal, self.config.journal_records)
        self._world: World = World(adapter, backend, store, self.config, self.journal)
        try:
            parts = self._world.attach()
        except BaseException:
            self.journal.close()
            raise
        facts = v.first_facts(parts, self._table.tags[1:], backend.resident(), adapter.has_groups(), store.copy)
        self._executor = Executor(self._world, self.journal, facts)
        self._machine = RunningMachine(self._table)
        self._uses = {use.operation: use for use in ACTOR_SPEC.uses}
        self._lock, self._owner, self._pid = threading.Lock(), _NOBODY, os.getpid()
        self._fault_effect = ""
        self._guarded = False
        adapter.install(self)
        _ATTACHED.add(self)
        owned = self._world.manifest().nbytes
        self.journal.add("attach", "attach", version=facts.tags[ACTOR], target=self._machine.state, nbytes=owned)

    def __enter__(self) -> ActorLifecycle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag}=v{version}" for tag, version in self.facts.tags.items())
        return f"<ActorLifecycle {self.state} {tags}>"

    # what is

    @property
    def state(self) -> ActorState:
        """The committed state; from any thread, never waiting."""
        state = self._table.states[self._machine.state]
        return evolve(state, effect=self._fault_effect) if state.name == "FAULTED" else state

    @property
    def moving(self) -> tuple[str, str] | None:
        """(event, effect) while an effect runs, else None; from any thread, never waiting."""
        return self._executor.moving

    @property
    def facts(self) -> Facts:
        """Everything the controller knows, as one frozen value."""
        return self._executor.facts

    @property
    def tags(self) -> dict[str, int]:
        """Tag to version id."""
        return dict(self.facts.tags)

    @property
    def traffic(self) -> Traffic:
        return self._executor.traffic

    @property
    def manifest(self) -> Manifest:
        """Every tensor the actor owns, with its region, slot and place."""
        return self._world.manifest()

    @property
    def memory(self) -> MemoryBackend:
        return self._world.backend

    def version(self, tag: str = ACTOR) -> Version:
        """The version that the tag points at. Raises UnknownTag."""
        self._known("version", tag)
        return self.facts.version_of(tag)

    def source(self, tag: str = ACTOR) -> Copy:
        """Where the tag's weights would be read from now: the least direct of its parts' best copies.

        Raises UnknownTag, and NoReadableCopy.
        """
        self._known("source", tag)
        return v.least_direct(v.sources(self.facts, tag).values())

    def plan(self, event: str, tag: str | None = None, of: str | None = None) -> Plan:
        """What the event would do, or why it is refused. Never acts. ``"sync"`` means its first half, until SYNCING."""
        tag = ACTOR if tag is None and event == "wake_up" else tag
        call = self._call("start_sync" if event == "sync" else event, tag=tag, of=of)
        settings, margin = self._world.settings(), self.config.memory_margin_bytes
        return make_plan(self._table, self._machine.state, self.facts, call, self._world, settings, margin)

    # events

    def sleep(self) -> None:
        """Release the device memory. On an ASLEEP actor nothing happens."""
        self._fire("sleep")

    def wake_up(self, tag: str = ACTOR) -> None:
        """Take memory back and restore the tag's version: RESIDENT for 'actor', SWITCHED(tag) for another."""
        self._fire("wake_up", tag=tag)

    def switch(self, tag: str) -> None:
        """Show the tag's version on the device; between tags of one version nothing is copied."""
        self._fire("switch", tag=tag)

    def begin_training(self) -> None:
        """Open a training phase: 'actor' points at a working version."""
        self._fire("begin_training")

    def end_training(self) -> None:
        """Close the phase: its weights are a new version."""
        self._fire("end_training")

    def abort_training(self) -> None:
        """Close the phase without a result; see ``on_abort``."""
        self._fire("abort_training")

    @contextmanager
    def training(self) -> Iterator[ActorLifecycle]:
        """One phase, any number of optimizer steps. An exception aborts it."""
        yield from self._block("begin_training", "end_training", "abort_training", lambda facts: facts.phase)

    @contextmanager
    def loading(self, tag: str) -> Iterator[ActorLifecycle]:
        """Write weights inside; they become the tag's new version. An exception puts back what was shown."""
        yield from self._block("load", "finish_load", "abort_load", lambda facts: facts.load, tag=tag)

    def discard_grads(self) -> None:
        """Give up gradients now; at the next begin_training() they come back as zeros."""
        self._fire("discard_grads")

    def adopt(self) -> None:
        """Make what the device holds the shown tag's new version; tags left without any copy of theirs move along."""
        self._fire("adopt")

    def tag(self, name: str, of: str) -> None:
        """Point a tag at another tag's version. No bytes move."""
        self._fire("tag", tag=name, of=of)

    def recover(self) -> None:
        """From FAULTED: read back what is there, restore the rest. Raises Faulted when something is lost for good."""
        self._fire("recover")

    def close(self) -> None:
        """End the life cycle: weights back on the device, hooks off, host memory given back. Once; then nothing."""
        with self._exclusive("close"):
            if self.facts.phase is not None and self.state.name == "RESIDENT":
                self._step("abort_training")
            if self.facts.load is not None and self.state.name in ("RESIDENT", "SWITCHED"):
                self._step("abort_load")
            closed = self.state.name == "CLOSED"
            self._step("close")
            if not closed:
                _ATTACHED.discard(self)
                self.journal.close()

    # scopes

    @contextmanager
    def using(self, tag: str) -> Iterator[ActorLifecycle]:
        """Show the tag inside, and go back to where it was on leaving. Nested uses of one tag move nothing."""
        scope = self._enter_scope(tag)
        try:
            yield self
        except BaseException as error:
            self._leave_scope_after(scope, error)
            raise
        self._leave_scope(scope)

    @contextmanager
    def hold(self) -> Iterator[ActorLifecycle]:
        """Awake and restored inside; leaving the outermost scope goes back to sleep if it was asleep."""
        with self.using(ACTOR):
            yield self

    @contextmanager
    def weights(self, tag: str = ACTOR) -> Iterator[Mapping[str, Tensor]]:
        """Name to tensor, views of the tag's readable copy, leased while inside. Read-only by contract.

        In any state but FAULTED and CLOSED. Raises NoReadableCopy.
        """
        lease = None
        try:
            with self._exclusive("weights"):
                self._known("weights", tag)
                self.permit("weights")
                where = v.sources(self.facts, tag)
                facts, lease = v.leased(self.facts, self.facts.tags[tag], where, "weights")
                views = self._world.read(facts, lease)
                self._executor.facts = facts
            yield views
        finally:
            if lease is not None:
                with self._exclusive("weights", wait=True):
                    self._executor.facts = v.released(self.facts, lease.id)
                    self._forget_unreferenced()

    # sync

    def sync(
        self,
        engines: RolloutEngine | Sequence[RolloutEngine],
        tag: str = ACTOR,
        rotate: Iterable[tuple[str, str]] = (),
        pause_mode: PauseMode = "abort",
    ) -> SyncReport:
        """Send the tag's version to every engine, from whatever copy is readable in this state, and publish it.

        ``rotate`` lists (tag, of) moves made after full success, in order, e.g. ``[("old_actor", "rollout_actor"),
        ("rollout_actor", "actor")]``. Raises SyncFailed if any engine did not take it: nothing is published then, and
        engines that saw a byte hold no version and stay paused.
        """
        self._known("sync", tag)
        began = time.perf_counter()
        by_name = _by_name(engines)
        session = SyncSession(by_name, self._world.store.shared, pause_mode)
        rotate = tuple(rotate)
        for name in (name for pair in rotate for name in pair):
            self._known("sync", name)
        arguments: dict[str, Any] = {
            "tag": tag,
            "engines": tuple(by_name),
            "host_copy": session.needs_host_copy,
            "rotate": rotate,
        }
        with self._exclusive("sync"):
            self._world.session = session
            try:
                self._step("start_sync", **arguments)
                version, source = self._leased_source()
                self._finish_sync(version, session, arguments)
            finally:
                self._world.session = None
        sent = sum(session.sent_bytes.values())
        seconds = time.perf_counter() - began
        return SyncReport(version, sent, seconds, source, dict(session.outcomes), dict(session.transports))

    def _leased_source(self) -> tuple[int, Copy]:
        lease = next(lease for lease in self.facts.leases if lease.reader == "sync")
        return lease.version, v.least_direct(lease.sources.values())

    def _finish_sync(self, version: int, session: SyncSession, arguments: Mapping[str, Any]) -> None:
        try:
            self._step("finish_sync", **arguments)
        except BaseException as error:
            if self.state.name == "SYNCING":
                self._fail_sync(arguments, error)
                if isinstance(error, Exception):
                    raise SyncFailed(version, session.outcomes) from error
            raise

    def _fail_sync(self, arguments: Mapping[str, Any], error: BaseException) -> None:
        """Back to where the sync began; a sync that can not even be ended is a fault, with a way out."""
        try:
            self._step("fail_sync", **arguments)
        except BaseException as second:
            error.add_note(f"ending the sync failed too: {second}")
            self._fault(self._machine.state, "fail_sync")
            raise error from second

    # what hooks ask and tell (adapters.base.Gate)

    def permit(self, operation: str) -> None:
        """Raise TransitionRefused unless the table allows this operation here."""
        use, state = self._uses[operation], self._table.states[self._machine.state]
        if Fact.WORKING in use.forbids and self._left_over():
            self._fire("abort_training")
        row = self._table.all_rows[0]  # conditions of a use do not depend on a row
        facts, call = self.facts, Call(operation, self.facts)

        def true(fact: Any) -> bool:
            return holds(fact, facts, call, row, self._world)

        ready = all(map(true, use.needs)) and not any(map(true, use.forbids))
        if ready and (state.name in use.states or any(map(true, use.or_when))):
            return
        if state.name == "FAULTED":
            raise Faulted(operation, self._fault_effect)
        allowed = allowed_events(self._table, self._machine.state)
        raise TransitionRefused(operation, str(self.state), allowed, use.reason, use.advice)

    def content_epoch(self) -> int:
        return self._world.epoch

    def backward_seen(self) -> None:
        if self.facts.phase is None and not self.facts.backward_seen:
            with self._exclusive("backward", wait=True):
                self._executor.facts = evolve(self.facts, backward_seen=True)

    def step_begins(self) -> None:
        self.permit("step")
        phase = self.facts.phase
        if phase is None or phase.implicit:  # one left over is aborted first
            self._fire("begin_training", implicit=True)
        with self._exclusive("step", wait=True):
            phase = self.facts.phase
            assert phase is not None
            self._executor.facts = evolve(self.facts, phase=evolve(phase, steps=phase.steps + 1))

    def step_ends(self) -> None:
        if self.facts.phase is not None and self.facts.phase.implicit:
            self._fire("end_training")

    def optimizer_loaded(self) -> None:
        self._fire("load_optimizer")

    # inside

    def _known(self, event: str, tag: str) -> None:
        if tag not in self.facts.tags:
            raise UnknownTag(event, str(self.state), tag, self.facts.tags)

    def _call(self, event: str, **arguments: Any) -> Call:
        config = self.config
        return Call(
            event,
            self._executor.facts,
            self._table.shown[self._machine.state],
            keep=config.keep,
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

    def _refuse(self, event: str, reason: str, advice: str = "") -> None:
        raise TransitionRefused(event, str(self.state), (), reason, advice)

    def _fire(self, event: str, **arguments: Any) -> None:
        with self._exclusive(event):
            self._step(event, **arguments)

    def _step(self, event: str, **arguments: Any) -> None:
        """One event, start to commit. The caller holds the lock."""
        if event not in ("end_training", "abort_training") and self._left_over():
            self._step("abort_training")
        call = self._call(event, **arguments)
        world, margin = self._world, self.config.memory_margin_bytes
        source = self._machine.state
        row = find_row(self._table, source, call.before, call, world, margin)
        if isinstance(row, TransitionRefused):
            raise self._told_where(row)
        planned = preview(row, call.before, call, world, world.settings())
        began = time.perf_counter()
        try:
            self._machine.fire(row, lambda: self._executor.run(row, call, planned))
        except EffectStopped as stop:
            self._stopped(row, call, stop.failure)
        self._commit(row, call, time.perf_counter() - began)

    def _left_over(self) -> bool:
        """Whether an implicit phase is open: its step raised, and whatever comes next aborts it."""
        phase = self.facts.phase
        return phase is not None and phase.implicit and self.state.name == "RESIDENT"

    def _told_where(self, refusal: TransitionRefused) -> TransitionRefused:
        if isinstance(refusal, Faulted):
            return Faulted(refusal.event, self._fault_effect, v.lost_tags(self.facts))
        return refusal

    def _commit(self, row: FlatRow, call: Call, seconds: float) -> None:
        if self._executor.facts is not call.before:
            self._forget_unreferenced()
            self._guard_forward()
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

    def _forget_unreferenced(self) -> None:
        self._executor.facts = v.prune(self._executor.facts)
        self._world.free_unreferenced(self._executor.facts)

    def _guard_forward(self) -> None:
        """Hooks on forward stand exactly while none is allowed: weights are released, or whose they are is unknown."""
        released = Region.WEIGHTS not in self.facts.resident or self.state.name == "FAULTED"
        if released != self._guarded:
            self._world.adapter.guard_released(released)
            self._guarded = released

    def _block(
        self, begin: str, end: str, abort: str, of: Callable[[Facts], Phase | Load | None], **arguments: Any
    ) -> Iterator[ActorLifecycle]:
        """A with-block from ``begin`` to ``end``. What it opened it ends, also where an interrupt came right after
        ``begin``; the first exception is the one that is raised."""
        before = of(self.facts)
        try:
            self._fire(begin, **arguments)
            yield self
            self._fire(end)
        except BaseException as error:
            now = of(self.facts)
            if now is not None and (before is None or now.version != before.version):
                try:
                    self._fire(abort)
                except LifecycleError as second:
                    error.add_note(f"{abort} failed too: {second}")
            raise

    def _enter_scope(self, tag: str) -> Scope:
        scope = None
        try:
            with self._exclusive("using"):
                self._known("using", tag)
                back = self._machine.state
                self._go(tag)
                scope = Scope(self.facts.next_id, tag, back)
                self._executor.facts = evolve(self.facts, scopes=(*self.facts.scopes, scope), next_id=scope.id + 1)
            return scope
        except BaseException as error:
            if scope is not None:  # an interrupt that was held back until now
                self._leave_scope_after(scope, error)
            raise

    def _go(self, tag: str) -> None:
        if self.state.name == "ASLEEP":
            self._step("wake_up", tag=tag)
        elif self._table.shown[self._machine.state] != tag or self.state.name == "SYNCING":
            self._step("switch", tag=tag)

    def _leave_scope(self, scope: Scope) -> None:
        """The innermost goes back to where it began; one left out of order (threads) hands its beginning on."""
        with self._exclusive("using", wait=True):
            scopes = self.facts.scopes
            place = next(n for n, held in enumerate(scopes) if held.id == scope.id)
            innermost = place == len(scopes) - 1
            rest = list(scopes[:place] + scopes[place + 1 :])
            if not innermost:
                rest[place] = evolve(rest[place], back=scopes[place].back)
            self._executor.facts = evolve(self.facts, scopes=tuple(rest))
            if innermost and self.state.name in ("RESIDENT", "SWITCHED"):
                self._go_back(scopes[place].back)

    def _go_back(self, flat: str) -> None:
        tag = self._table.shown[flat]
        if tag is None:
            self._step("sleep")
        elif tag != self._table.shown[self._machine.state]:
            self._step("switch", tag=tag)

    def _leave_scope_after(self, scope: Scope, error: BaseException) -> None:
        try:
            self._leave_scope(scope)
        except LifecycleError as second:
            error.add_note(f"leaving the scope failed too: {second}")


def _checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise ValueError(f"tags={tags!r}: give a sequence of names, such as ({tags!r},)")
    names = tuple(tags)
    wrong = [name for name in names if not isinstance(name, str) or not name.isidentifier() or name == ACTOR]
    if wrong or len(set(names)) != len(names):
        raise ValueError(f"tags={names}: tags are distinct identifiers other than 'actor', which is always there")
    return names


def _by_name(engines: RolloutEngine | Sequence[RolloutEngine]) -> dict[str, RolloutEngine]:
    several = list(engines) if isinstance(engines, Sequence) else [engines]
    names = [engine.name for engine in several]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"engines={names}: give at least one engine, each with a name of its own")
    return dict(zip(names, several, strict=True))
