"""The controller: one actor's life cycle, behind the public interface.

How an event runs, from lock to commit, is in ``lifecycle.steps``; what hooks ask is in ``lifecycle.gate``; scopes and
readers are in ``lifecycle.scopes``. Here are the events by their names, the blocks made of them, and sync.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from attrs import frozen

from lifecycle import versions as v
from lifecycle.adapters.base import Adapter
from lifecycle.attach import (
    checked_tags,
    device_type_of,
    make_adapter,
    make_backend,
    make_store,
    refuse_second_attach,
    refuse_untrained_optimizer,
)
from lifecycle.config import LifecycleConfig
from lifecycle.errors import (
    LifecycleError,
    SyncFailed,
)
from lifecycle.hoststore.base import HostStore
from lifecycle.journal import Journal
from lifecycle.manifest import Manifest
from lifecycle.memory.base import MemoryBackend
from lifecycle.own import Handler, checked_handlers
from lifecycle.plan import Plan, Table, make_plan, public_events
from lifecycle.rollout.base import PauseMode, RolloutEngine
from lifecycle.scopes import Scopes
from lifecycle.sync.session import SyncSession
from lifecycle.traffic import Traffic
from lifecycle.versions import ACTOR, Version
from lifecycle.work import own_facts
from lifecycle.world import World
from states.actor import ACTOR as ACTOR_SPEC
from states.resources import Copy
from states.spec import MachineSpec

_ATTACHED: WeakSet[ActorLifecycle] = WeakSet()
_METHODS = frozenset(event.name for event in ACTOR_SPEC.events if not event.internal)  # each has a method
_WITH_MORE = {"load": "loading(tag), a block", "tag": "tag(name, of)", "sync": "sync(engines)"}


@frozen
class SyncReport:
    """What a sync did. ``outcomes`` maps engine to "updated"; a sync that is not whole raises SyncFailed instead."""

    version: int
    nbytes: int
    seconds: float
    source: Copy
    outcomes: Mapping[str, str]
    transports: Mapping[str, str]


class ActorLifecycle(Scopes):
    """The life cycle of one training actor.

    ``model`` is an ``nn.Module`` or a sequence of them, ``optimizer`` a ``torch.optim.Optimizer``, a sequence of them
    or None. ``tags`` are names for further versions beside ``actor``; at first all point at the weights attached.
    ``name`` tells the actors of one process apart, as in ``lifecycle.region(..., actor=name)``. ``extra`` names plain
    tensor attributes (dotted paths, patterns, or (name, module) pairs) that the actor owns too, ``waive`` those that it
    shall leave alone. ``memory`` and ``host`` choose a memory backend and a host store by name, or are one. ``machine``
    is the table to obey, ``perform`` has a handler for each effect of its own (``docs/extending.md``). Raises
    ManifestError when something is owned by nobody or by two, and ValueError for bad settings and for a machine that
    can not drive this actor.
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
        name: str = "actor",
        extra: Sequence[Any] = (),
        waive: Sequence[str] = (),
        adapter: Adapter | None = None,
        machine: MachineSpec = ACTOR_SPEC,
        perform: Mapping[str, Handler] | None = None,
    ) -> None:
        config = config or LifecycleConfig()
        table = Table.of(machine, (ACTOR, *checked_tags(tags)))
        handlers = checked_handlers(machine, perform)
        adapter = adapter or make_adapter(model, optimizer, extra, waive)
        device_type = device_type_of(adapter)
        chosen, store = make_backend(memory, name, device_type), make_store(host, device_type)
        refuse_untrained_optimizer(adapter, machine)
        refuse_second_attach(adapter, [actor._world.attached for actor in _ATTACHED])
        journal = Journal(config.journal, config.journal_records)
        world = World(adapter, chosen.backend, store, config, journal, handlers)
        try:
            parts = world.attach()
        except BaseException:
            journal.close()
            raise
        own = own_facts(machine.state(machine.initial).holds)
        facts = v.first_facts(parts, table.tags[1:], world.mapped(), adapter.has_groups(), store.copy, own)
        super().__init__(table, world, facts)
        owned, version = world.manifest().nbytes, facts.tags[ACTOR]
        try:
            journal.add("attach", "attach", version=version, target=str(self.state), nbytes=owned, note=chosen.why)
        except BaseException:
            world.let_go()
            journal.close()
            raise
        adapter.install(self)
        _ATTACHED.add(self)

    def __enter__(self) -> ActorLifecycle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag}=v{version}" for tag, version in self.facts.tags.items())
        return f"<ActorLifecycle {self.state} {tags}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The machine as a picture, with the current state marked."""
        from lifecycle.render.notebook import mimebundle

        return mimebundle(self._table.spec, self._table.tags, str(self.state))

    def _repr_svg_(self) -> str | None:
        from lifecycle.render.notebook import svg

        return svg(self._table.spec, self._table.tags, str(self.state))

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

    def fire(self, event: str, tag: str | None = None) -> None:
        """Ask for an event by its name: one of the machine's own, or as the method of that name does.

        Raises ValueError for an event that the machine does not have, or that is not a caller's to ask for.
        """
        known = public_events(self._table.spec)
        if event not in known:
            raise ValueError(f"there is no event {event!r} to ask for; known: {', '.join(known)}")
        if event in _WITH_MORE:
            raise ValueError(f"{event!r} is not asked for by its name alone: use {_WITH_MORE[event]}")
        if event in _METHODS:
            getattr(self, event)(*(() if tag is None else (tag,)))
        else:
            self._fire(event, tag=tag)

    def sleep(self) -> None:
        """Release the device memory. On an ASLEEP actor nothing happens."""
        self._fire("sleep")

    def wake_up(self, tag: str = ACTOR, stream: bool = False) -> None:
        """Take memory back and restore the tag's version: RESIDENT for 'actor', SWITCHED(tag) for another.

        On an accelerator the bytes may still be on their way when this returns (``state.arriving``): launches on the
        caller's stream come after them, and whatever else needs them waits. With ``stream`` it returns when the first
        block's bytes are there, and every later block of a forward waits for its own: for models whose forward calls
        its layers and its head as modules (``lifecycle.adapters.blocks``), since a weight that is read without a call
        of its module may not be there yet. Bytes that turn out wrong are an error of whoever waits for them, and a
        fault.
        """
        self._fire("wake_up", tag=tag, stream=stream)

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

        Where the actor's weights can not be brought back (too little memory, a spoiled copy, a model that was cast
        meanwhile) nothing is given back and the error says why; ``force`` gives them up instead.
        """
        with self._exclusive("close"):
            closed = self._table.spec.state(self.state.name).final
            try:
                self._end_open_business()
                self._step("close")
            except LifecycleError:
                if not force:
                    raise
                self._fault(self._machine.state, "close")  # from there, what can not be brought back is given up
                self._step("close", force=True)
            if not closed:
                _ATTACHED.discard(self)
                self.journal.close()

    def _end_open_business(self) -> None:
        if self.facts.phase is not None and self._answers("abort_training"):
            self._step("abort_training")
        if self.facts.load is not None and self._answers("abort_load"):
            self._step("abort_load")

    # sync

    def sync(
        self,
        engines: RolloutEngine | Sequence[RolloutEngine],
        tag: str = ACTOR,
        rotate: Iterable[tuple[str, str]] | Mapping[str, str] = (),
        pause_mode: PauseMode = "abort",
    ) -> SyncReport:
        """Send the tag's version to every engine, from whatever copy is readable in this state, and publish it.

        ``rotate`` lists (tag, of) moves made after full success, in order, e.g. ``[("old_actor", "rollout_actor"),
        ("rollout_actor", "actor")]``. Raises SyncFailed if any engine did not take it: nothing is published then, and
        engines that saw a byte hold no version and stay paused. Raises UnknownTag, and ValueError for moves that are
        no pairs.
        """
        self._known("sync", tag)
        began = time.perf_counter()
        by_name = _by_name(engines)
        unsure = [name for name in by_name if self.facts.engines.get(name) is None]
        session = SyncSession(by_name, self._world.store.shared, pause_mode, unsure)
        moves = _moves(rotate)
        for name in (name for move in moves for name in move):
            self._known("sync", name)
        arguments: dict[str, Any] = {
            "tag": tag,
            "engines": tuple(by_name),
            "host_copy": session.needs_host_copy,
            "rotate": moves,
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
            if not self._at_rest():
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


def _moves(rotate: Iterable[tuple[str, str]] | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """(tag, of) pairs in their order. Raises ValueError for what is none."""
    given = tuple(rotate.items() if isinstance(rotate, Mapping) else rotate)
    if any(isinstance(move, str) or len(move) != 2 for move in given):
        raise ValueError(f'rotate takes (tag, of) pairs, like [("old_actor", "actor")], and not {rotate!r}')
    return tuple((tag, of) for tag, of in given)


def _by_name(engines: RolloutEngine | Sequence[RolloutEngine]) -> dict[str, RolloutEngine]:
    several = list(engines) if isinstance(engines, Sequence) else [engines]
    names = [engine.name for engine in several]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"engines={names}: give at least one engine, each with a name of its own")
    return dict(zip(names, several, strict=True))
