"""The controller: one actor's life cycle, behind the public interface.

How an event runs, from lock to commit, is in ``lifecycle.steps``; what hooks ask is in ``lifecycle.gate``. Here are the
events by their names, the blocks made of them (phases, loads, scopes, leases), and sync.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import evolve, frozen

from lifecycle import versions as v
from lifecycle.adapters.base import Adapter
from lifecycle.attach import make_adapter, make_backend, make_store, refuse_second_attach
from lifecycle.config import LifecycleConfig
from lifecycle.errors import (
    LifecycleError,
    SyncFailed,
)
from lifecycle.executor import Traffic
from lifecycle.gate import HookGate
from lifecycle.hoststore.base import HostStore
from lifecycle.journal import Journal
from lifecycle.manifest import Manifest
from lifecycle.memory.base import MemoryBackend
from lifecycle.plan import Plan, Table, make_plan
from lifecycle.rollout.base import PauseMode, RolloutEngine
from lifecycle.sync.session import SyncSession
from lifecycle.versions import ACTOR, Scope, Version
from lifecycle.world import World
from states.actor import ACTOR as ACTOR_SPEC
from states.resources import Copy

if TYPE_CHECKING:
    from torch import Tensor

_ATTACHED: WeakSet[ActorLifecycle] = WeakSet()


@frozen
class SyncReport:
    """What a sync did. ``outcomes`` maps engine to "updated"; a sync that is not whole raises SyncFailed instead."""

    version: int
    nbytes: int
    seconds: float
    source: Copy
    outcomes: Mapping[str, str]
    transports: Mapping[str, str]


class ActorLifecycle(HookGate):
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
        config = config or LifecycleConfig()
        table = Table.of(ACTOR_SPEC, (ACTOR, *_checked_tags(tags)))
        backend, store = make_backend(memory), make_store(host)
        adapter = adapter or make_adapter(model, optimizer, extra, waive)
        refuse_second_attach(adapter, [actor._world.attached for actor in _ATTACHED])
        journal = Journal(config.journal, config.journal_records)
        world = World(adapter, backend, store, config, journal)
        try:
            parts = world.attach()
        except BaseException:
            journal.close()
            raise
        facts = v.first_facts(parts, table.tags[1:], backend.resident(), adapter.has_groups(), store.copy)
        super().__init__(table, world, facts)
        adapter.install(self)
        _ATTACHED.add(self)
        owned = world.manifest().nbytes
        journal.add("attach", "attach", version=facts.tags[ACTOR], target=str(self.state), nbytes=owned)

    def __enter__(self) -> ActorLifecycle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag}=v{version}" for tag, version in self.facts.tags.items())
        return f"<ActorLifecycle {self.state} {tags}>"

    # what is

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
        event = "start_sync" if event == "sync" else event
        known = [known.name for known in self._table.spec.events]
        if event not in known:
            raise ValueError(f"unknown event {event!r}; known: {', '.join(known)}")
        tag = ACTOR if tag is None and event == "wake_up" else tag
        call = self._call(event, tag=tag, of=of)
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
        with self._block("begin_training", "end_training", "abort_training", lambda facts: facts.phase):
            yield self

    @contextmanager
    def loading(self, tag: str) -> Iterator[ActorLifecycle]:
        """Write weights inside; they become the tag's new version. An exception puts back what was shown."""
        with self._block("load", "finish_load", "abort_load", lambda facts: facts.load, tag=tag):
            yield self

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

    def close(self, force: bool = False) -> None:
        """End the life cycle: weights back on the device, hooks off, host memory given back. Once; then nothing.

        Where the actor's weights can not be brought back (too little memory, a spoiled copy) nothing is done and the
        error says why; ``force`` gives them up instead.
        """
        with self._exclusive("close"):
            closed = self.state.name == "CLOSED"
            try:
                self._end_open_business()
                self._step("close")
            except LifecycleError:
                if not force:
                    raise
                self._fault(self._machine.state, "close")  # from there, what can not be brought back is given up
                self._step("close")
            if not closed:
                _ATTACHED.discard(self)
                self.journal.close()

    def _end_open_business(self) -> None:
        if self.facts.phase is not None and self.state.name == "RESIDENT":
            self._step("abort_training")
        if self.facts.load is not None and self.state.name in ("RESIDENT", "SWITCHED"):
            self._step("abort_load")

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
        unsure = [name for name in by_name if self.facts.engines.get(name) is None]
        session = SyncSession(by_name, self._world.store.shared, pause_mode, unsure)
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
