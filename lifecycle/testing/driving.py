"""Asking a real controller for an event and holding it to what is expected; see ``lifecycle.testing.stateful``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from attrs import evolve

from lifecycle import ActorLifecycle, LifecycleConfig
from lifecycle.attach import make_store
from lifecycle.errors import EffectFailed, Faulted, LifecycleError, TransitionRefused
from lifecycle.own import Handler
from lifecycle.testing.busy import BusyAdapter
from lifecycle.testing.expectation import Expected, Reader, Scope
from lifecycle.testing.subjects import Contents, Subject, Tensors, bits, different_names, make_subject, same_bits
from lifecycle.testing.trouble import CopyingEngine, Fault, FlakyStore, TightArena
from lifecycle.versions import ACTOR
from states.actor import ACTOR as ACTOR_SPEC
from states.resources import Region
from states.spec import MachineSpec

POISON = 0xCB
TAGS = ("ref", "old")
ALL = (ACTOR, *TAGS)
REGIONS = frozenset({Region.WEIGHTS, Region.OPTIMIZER, Region.REST})


class Driver:
    """One subject, its twin that nobody controls, and the controllers that it is given one after the other.

    ``machine`` is what drives them, ``perform`` the handlers of its own effects (a property where they are the test's).
    """

    machine: MachineSpec = ACTOR_SPEC
    perform: Mapping[str, Handler] = MappingProxyType({})
    subject: Subject
    twin: Subject
    actor: ActorLifecycle
    expected: Expected

    def make_subject(self, optimizer: str) -> Subject:
        return make_subject(optimizer)

    def make_memory(self) -> TightArena:
        return TightArena(poison=POISON)

    def make_host(self, kind: str) -> FlakyStore:
        return FlakyStore(make_store(kind, "cpu"))

    def prepare(self, optimizer: str) -> None:
        self.subject, self.twin = self.make_subject(optimizer), self.make_subject(optimizer)
        self.engines = {
            "a": CopyingEngine("a", transports=("in_process",)),
            "b": CopyingEngine("b", transports=("shared_memory",)),
        }
        self.structure = self.subject.structure()
        self.kept: Tensors = {}  # optimizer state of an earlier visit

    def attach(self, config: LifecycleConfig, host: str, busy: bool) -> None:
        """``busy``: with workspaces and process groups."""
        subject = self.subject
        self.store, self.arena = self.make_host(host), self.make_memory()
        self.adapter = BusyAdapter(subject.model, subject.optimizer, extra=subject.extra) if busy else None
        options: dict[str, Any] = {"extra": subject.extra} if self.adapter is None else {"adapter": self.adapter}
        options |= {"machine": self.machine, "perform": self.perform}
        self.actor = ActorLifecycle(
            subject.model, subject.optimizer, TAGS, memory=self.arena, host=self.store, config=config, **options
        )
        self.age = 0
        self.faulted = self.loose = False
        self.readers: list[Reader] = []
        self.scopes: list[Scope] = []
        self.loading: Any = None
        self.outcomes: list[Contents] = []  # what may be 'actor' after a fault
        self.possible: dict[str, list[Tensors]] = {}  # what may be another tag after a fault, beside what it was
        now = subject.contents()
        tags = dict.fromkeys(ALL, now.weights)
        version = self.actor.tags[ACTOR]
        self.expected = Expected(tags, now.weights, now.rest, now.optimizer, now.grads, version, config.keep)

    # asking

    @property
    def reading_device(self) -> bool:
        return any(reader.on_device for reader in self.readers)

    def may(self, event: str, tag: str | None = None, of: str | None = None) -> bool:
        if self.faulted or not {tag, of} - {None} <= set(ALL):
            return False
        return self.expected.may(event, tag, of, self.reading_device, bool(self.scopes))

    def seen(self) -> dict[str, Any]:
        """What a refused or undone event must leave as it was; tensors are compared after every rule anyway."""
        return {"state": self.state, "tags": self.actor.tags, "published": self.actor.facts.published}

    @property
    def state(self) -> str:
        """Whether its bytes are still on their way is nobody's business here: who reads them waits."""
        return str(evolve(self.actor.state, arriving=False))

    def moved(self) -> tuple[Any, ...]:
        traffic, pool = self.actor.traffic, self.actor._world.pool
        return traffic.device_to_host, traffic.host_to_device, pool.allocated_bytes, self.arena.held()

    def copied_out(self) -> int:
        """Bytes of weights copied to the host so far."""
        return self.actor.traffic.per_region.get("weights", {}).get("device_to_host", 0)

    def event(
        self,
        name: str,
        act: Callable[[], object],
        tag: str | None = None,
        of: str | None = None,
        fault: Fault | None = None,
        allowed: bool = True,
    ) -> bool:
        """Ask for an event of the table; whether it came about. What an earlier step left open ends first."""
        if self.expected.leftover and name not in ("end_training", "abort_training"):
            settled = self.settle()
            return self.ask(act, allowed and settled and self.may(name, tag, of), unchanged=False)
        self.aim(fault, name, tag, of)
        final = name in ("sleep", "discard_grads")
        return self.ask(act, allowed and self.may(name, tag, of), fault, final=final)

    def own_event(
        self, name: str, allowed: Callable[[], bool], tag: str | None = None, fault: Fault | None = None
    ) -> bool:
        """Ask for an event of the machine's own; whether it came about, which it must where it is ``allowed``.

        What is expected knows only the states of the actor's table: end in one of these what a rule begins.
        """

        def act() -> None:
            self.actor.fire(name, tag)

        if self.expected.leftover:
            settled = self.settle()
            return self.ask(act, settled and allowed(), unchanged=False)
        self.aim(fault, name, tag)
        return self.ask(act, not self.faulted and allowed(), fault)

    def aim(self, fault: Fault | None, event: str, tag: str | None = None, of: str | None = None) -> None:
        """At one of the actions that there are to do."""
        if fault is not None:
            planned = self.actor.plan(event, tag, of).effects
            fault.at %= max(1, sum(len(effect.actions) for effect in planned))

    def ask(
        self,
        act: Callable[[], object],
        allowed: bool,
        fault: Fault | None = None,
        unchanged: bool = True,
        final: bool = False,
    ) -> bool:
        """Whether it came about. What was refused or undone has changed nothing."""
        before, moved = self.seen(), self.moved()
        final |= self.actor.state.arriving  # what came wrong is a fault
        error = self.attempt(act, fault)
        if error is None:
            assert allowed, "came about, but must be refused"
            assert not self.hit(fault), "a failure was swallowed"
            return True
        if not allowed and not (final and self.hit(fault)):
            self.refused(error, before, moved, unchanged)
        elif not self.hit(fault):
            raise error
        else:
            self.stopped(error, before, fault, final)
        return False

    def refused(self, error: BaseException, before: dict[str, Any], moved: Any, unchanged: bool = True) -> None:
        if not isinstance(error, TransitionRefused):
            raise error
        if unchanged:
            assert (self.seen(), self.moved()) == (before, moved)

    def attempt(self, act: Callable[[], object], fault: Fault | None = None) -> BaseException | None:
        """What it raised."""
        with self.trouble(fault):
            try:
                act()
            except BaseException as error:
                return error
        return None

    @contextmanager
    def trouble(self, fault: Fault | None) -> Iterator[None]:
        self.store.refused = 0
        if fault is None:
            yield
        elif fault.error is OSError:  # the store's: it has no room
            self.store.full = OSError if fault.ran else MemoryError
            yield
            self.store.full = None
        else:
            with fault.inside(self.actor):
                yield

    def hit(self, fault: Fault | None) -> bool:
        return fault is not None and bool(fault.fired or self.store.refused)

    def stopped(self, error: BaseException, before: dict[str, Any], fault: Fault | None, final: bool = False) -> None:
        """An event was made to fail: it was undone, or the actor is FAULTED.

        FAULTED only where undoing was made to fail too, or where the event has a point of no return (``final``).
        """
        if not isinstance(error, LifecycleError | KeyboardInterrupt):
            raise error
        assert isinstance(error, Faulted) or not isinstance(error, TransitionRefused), error
        faulted = self.actor.state.name == "FAULTED"
        if isinstance(error, EffectFailed):
            assert error.rolled_back is not faulted
        if faulted:
            undoable = self.store.refused or (fault is not None and fault.fired < 2 and not final)
            assert before["state"].startswith("FAULTED") or not undoable, "a fault, but it could be undone"
            self.fall()
        else:
            assert self.seen() == before
            self.take_grads()

    def fall(self) -> None:
        """FAULTED: all but recover() and close() is refused, and nobody relies on the device."""
        expected = self.expected
        for reader in [reader for reader in self.readers if reader.on_device]:
            self.stop(reader)
        if not self.faulted:
            now = expected.contents
            self.outcomes = [evolve(now, weights=expected.weights[ACTOR])]
            if expected.phase is not None:
                self.outcomes = [expected.phase.base, now]
        self.faulted = True
        expected.shown = expected.load = None
        if self.loading is not None:
            block, self.loading = self.loading, None
            assert isinstance(self.attempt(lambda: block.__exit__(None, None, None)), Faulted)

    def stop(self, reader: Reader) -> None:
        self.readers.remove(reader)
        reader.block.__exit__(None, None, None)

    def take_grads(self) -> None:
        """After a failure gradients may be as they were, dropped, or zeros in the place of dropped ones."""
        found = self.subject.grads()
        for name, grad in found.items():
            was = self.expected.grads.get(name)
            assert not grad.count_nonzero() if was is None else bits(grad) == bits(was), name
        self.expected.grads = found
        self.loose = True

    # phases

    def settle(self) -> bool:
        """A phase that a step outside any left open ends with the next event; that is refused where it can not."""
        phase = self.expected.phase
        if phase is None or not phase.implicit:
            return True
        if self.reading_device:
            return False
        assert not phase.trained
        self.expected.end_phase(phase.base, phase.version)
        return True

    def begun(self) -> None:
        self.expected.begin_phase()
        if self.loose:
            self.take_grads()
            self.loose = False

    def aborted(self) -> None:
        """The old contents, or all that the phase made, never a mixture; and which of them where there is no choice."""
        phase, made, live = self.expected.phase, self.expected.contents, self.subject.contents()
        assert phase is not None
        version = self.actor.tags[ACTOR]
        again = version == phase.version
        changed = not same_bits(phase.base.weights, made.weights)
        if not changed:
            assert again, "the same weights have a new version"
        elif self.actor.config.on_abort == "keep":
            assert not again, "restored, but should be kept"
        elif self.expected.safe:
            assert again, "kept, but there was a copy to restore"
        optimizer_made = not changed and phase.trained and same_bits(live.optimizer, made.optimizer)
        self.expected.end_phase(made if optimizer_made or not again else phase.base, version)

    def both(self, act: Callable[[Subject], object]) -> None:
        """The same on the twin and on the real one; what the twin has then is what must be."""
        self.twin.hold(self.expected.contents)
        act(self.twin)
        act(self.subject)
        self.expected.take(self.twin.contents())

    # after a fault, and the end

    def recovered(self) -> None:
        """Everything is there again; an open phase left its result or its base, and not a mixture."""
        state, expected = self.actor.state.name, self.expected
        assert state in ("RESIDENT", "ASLEEP")
        self.faulted, expected.phase = False, None
        for tag, others in self.possible.items():
            got = self.read(tag)
            expected.weights[tag] = next((t for t in others if same_bits(t, got)), expected.weights[tag])
        found = [outcome for outcome in self.outcomes if same_bits(outcome.weights, self.read(ACTOR))]
        assert found, "weights are lost"
        if state == "RESIDENT":
            live = self.subject.optimizer_state()
            found = [outcome for outcome in found if same_bits(outcome.optimizer, live)]
            assert found, "optimizer state is lost"
        expected.weights[ACTOR], expected.optimizer = found[0].weights, found[0].optimizer
        self.outcomes, self.possible = [], {}
        self.take_grads()
        if state == "RESIDENT":
            expected.show(ACTOR)
        else:
            expected.optimizer_there = expected.rest_there = True
            expected.sleep()
        facts = self.actor.facts
        expected.version, expected.published = facts.tags[ACTOR], facts.published
        expected.backward_left = facts.backward_seen
        expected.safe = expected.copied = False

    def read(self, tag: str) -> Tensors:
        with self.actor.weights(tag) as views:
            return {name: tensor.clone() for name, tensor in views.items()}

    def shut(self, fault: Fault | None = None) -> None:
        """close(), refused while somebody reads; then the model is its owner's again."""
        actor, expected = self.actor, self.expected
        if self.readers and not self.faulted:
            assert isinstance(self.attempt(actor.close), TransitionRefused)
        for reader in list(self.readers):
            self.stop(reader)
        phase, now = expected.phase, expected.contents
        outcomes = self.outcomes or [evolve(now, weights=expected.weights[ACTOR])]
        if phase is not None and not self.faulted:
            outcomes = [phase.base, now]
        error = self.attempt(actor.close, fault)
        if error is not None:
            if not self.hit(fault):
                raise error
            actor.close()
        self.closed(outcomes)

    def closed(self, outcomes: list[Contents]) -> None:
        actor = self.actor
        assert actor.state.name == "CLOSED"
        actor.close()  # once more does nothing
        live = self.subject.contents()
        assert any(same_bits(o.weights, live.weights) for o in outcomes), "the model has lost its weights"
        assert any(same_bits(o.weights, live.weights) and same_bits(o.optimizer, live.optimizer) for o in outcomes)
        assert not different_names(live.rest, self.expected.rest)
        assert self.arena.resident() >= REGIONS
        assert actor._world.pool.allocated_bytes == 0
        assert not actor._world.adapter.installed()
        assert self.adapter is None or self.adapter.groups
        for scope in reversed(self.scopes):
            scope.block.__exit__(None, None, None)
        if self.loading is not None:
            assert isinstance(self.attempt(lambda: self.loading.__exit__(None, None, None)), TransitionRefused)
        self.subject.forward(0).backward()  # type: ignore[no-untyped-call]
