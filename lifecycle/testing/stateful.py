"""A Hypothesis state machine that drives a real controller on a real backend, against a dictionary of tensors.

What is expected (``lifecycle.testing.expectation``) is written from the documentation alone: which events may happen
when, and what every tag's weights are then. What a training step makes is computed on a twin of the model that nobody
controls. After every rule all that can be read is compared with it, bit for bit.

Test an actor of your own by saying how to make it (twice the same, and it must be deterministic)::

    class MyMachine(LifecycleMachine):
        def make_subject(self, optimizer: str) -> Subject: ...

    TestMyActor = MyMachine.TestCase
    TestMyActor.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

Call ``pytest.register_assert_rewrite("lifecycle.testing.driving")`` in ``conftest.py`` to see values in failures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import LifecycleConfig
from lifecycle.errors import (
    EngineError,
    LifecycleError,
    ManifestError,
    SyncFailed,
    TransitionRefused,
    UntrackedChange,
)
from lifecycle.testing.driving import ALL, Driver
from lifecycle.testing.expectation import Reader, Scope
from lifecycle.testing.subjects import different_names
from lifecycle.testing.trouble import CopyingEngine, Fault
from lifecycle.versions import ACTOR

ENGINE_METHODS = (
    "pause_generation",
    "flush_cache",
    "begin_update",
    "check_weights",
    "end_update",
    "continue_generation",
    "abort_update",
)
ROTATIONS = ((), (), (("old", ACTOR),), (("old", "ref"), ("ref", ACTOR)), (("ref", "old"),))

tags = st.sampled_from((*ALL, *ALL, "nobody"))
known_tags = st.sampled_from(ALL)
seeds = st.integers(0, 3)
hosts = st.sampled_from(("shared", "pinned"))
configs = st.builds(
    LifecycleConfig,
    on_abort=st.sampled_from(("restore", "keep")),
    on_untracked=st.sampled_from(("refuse", "adopt")),
    keep=st.sampled_from(((), (), (), ("optimizer",), ("grads",), ("rest",))),
    protect_copies=st.just(True),
)


@st.composite
def faults(draw: st.DrawFn, actions: int = 12) -> Fault | None:
    """Mostly none; else one of the first actions fails, before or after it has acted, or the store has no room."""
    if draw(st.integers(0, 4)) < 4:
        return None
    at, error = draw(st.integers(0, actions - 1)), draw(st.sampled_from((RuntimeError, OSError, KeyboardInterrupt)))
    return Fault(at, ran=draw(st.booleans()), again=draw(st.sampled_from((False, False, True))), error=error)


def healthy(machine: Driver) -> bool:
    return not machine.faulted


def worthwhile(*events: str) -> Callable[[Driver], bool]:
    """Where one of the events can happen for some tags, and sometimes elsewhere too."""

    def chosen(machine: Driver) -> bool:
        if machine.faulted or machine.age % 4 == 0:
            return not machine.faulted
        return any(machine.may(event, tag, of) for event in events for tag in ALL for of in ALL)

    return chosen


class LifecycleMachine(Driver, RuleBasedStateMachine):
    """See the module. Override ``make_subject``, ``make_memory`` and ``make_host`` to test something else."""

    @initialize(
        config=configs,
        host=hosts,
        optimizer=st.sampled_from(("adamw", "sgd")),
        busy=st.booleans(),
        distinct=st.booleans(),
    )
    def start(self, config: LifecycleConfig, host: str, optimizer: str, busy: bool, distinct: bool) -> None:
        """``distinct``: every tag has weights of its own, those of 'actor' are on the device alone."""
        self.prepare(optimizer)
        self.attach(config, host, busy)
        if distinct:
            self.open_load("ref", None)
            self.write_load(0, some=False)
            self.leave_load(raises=False, fault=None)
            self.training(1, 0, raises=False)
            self.move_tag("old", ACTOR, None)
            self.training(1, 1, raises=False)

    def teardown(self) -> None:
        if hasattr(self, "actor") and sys.exc_info()[0] is None:
            self.shut()

    @invariant()
    def holds(self) -> None:
        self.check_state()
        self.check_books()
        self.check_tags()
        self.check_device()
        self.check_refusals()
        self.age += 1

    # moving

    @precondition(worthwhile("sleep"))
    @rule(fault=faults())
    def sleep(self, fault: Fault | None) -> None:
        expected, before, pure = self.expected, self.copied_out(), self.expected.copied
        asleep = expected.shown is None
        if self.event("sleep", self.actor.sleep, fault=fault) and not asleep:
            assert not pure or self.copied_out() == before, "copied out once more"
            expected.sleep()

    @precondition(lambda self: healthy(self) and (self.expected.shown is None or self.age % 4 == 0))
    @rule(tag=tags, room=st.sampled_from((None, None, None, 0)), fault=faults())
    def wake_up(self, tag: str, room: int | None, fault: Fault | None) -> None:
        asleep, self.arena.room = self.expected.shown is None, room
        fits = room is None or not asleep
        if self.event("wake_up", lambda: self.actor.wake_up(tag), tag, fault=fault, allowed=fits) and asleep:
            self.expected.show(tag)
        self.arena.room = None

    @precondition(worthwhile("switch"))
    @rule(tag=tags, fault=faults())
    def switch(self, tag: str, fault: Fault | None) -> None:
        expected, versions, before = self.expected, self.actor.tags, self.moved()
        one_version = versions.get(tag) == versions.get(expected.shown or "") and not expected.leftover
        if self.event("switch", lambda: self.actor.switch(tag), tag, fault=fault):
            if one_version and (expected.optimizer_there or tag != ACTOR):
                assert self.moved() == before, "moved bytes between tags of one version"
            if tag != expected.shown:
                expected.show(tag)

    # training

    @precondition(worthwhile("begin_training"))
    @rule(fault=faults())
    def begin_training(self, fault: Fault | None) -> None:
        if self.event("begin_training", self.actor.begin_training, fault=fault):
            self.begun()

    @precondition(worthwhile("end_training"))
    @rule(abort=st.booleans(), fault=faults())
    def end_training(self, abort: bool, fault: Fault | None) -> None:
        if abort:
            if self.event("abort_training", self.actor.abort_training, fault=fault):
                self.aborted()
        elif self.event("end_training", self.actor.end_training, fault=fault):
            self.expected.end_phase(self.expected.contents, self.actor.tags[ACTOR])

    @precondition(lambda self: self.may("begin_training"))
    @rule(steps=st.integers(0, 2), seed=seeds, raises=st.booleans())
    def training(self, steps: int, seed: int, raises: bool) -> None:
        def phase() -> None:
            with self.actor.training():
                self.begun()
                for number in range(steps):
                    self.train_step(seed + number)
                if raises:
                    raise ArithmeticError("no loss")

        error = self.attempt(phase)
        if error is None:
            self.expected.end_phase(self.expected.contents, self.actor.tags[ACTOR])
        elif raises and isinstance(error, ArithmeticError):
            self.aborted()
        else:
            raise error

    def train_step(self, seed: int) -> None:
        self.both(lambda subject: subject.train_step(seed))
        self.expected.trained()

    @precondition(lambda self: healthy(self) and (self.expected.shown == ACTOR or self.age % 4 == 0))
    @rule(seed=seeds, raises=st.sampled_from((False, False, True)), fault=faults())
    def step(self, seed: int, raises: bool, fault: Fault | None) -> None:
        """Inside a phase a step of it, else an implicit phase of one step."""
        expected = self.expected
        if raises:
            self.step_that_raises()
        elif expected.shown != ACTOR or expected.load is not None:
            self.ask(self.subject.optimizer.step, allowed=False)
        elif expected.phase is not None and not expected.leftover:
            self.train_step(seed)
        else:
            self.both(lambda subject: subject.backward(seed))
            expected.backward_left |= expected.phase is None
            self.implicit_step(fault)

    def implicit_step(self, fault: Fault | None) -> None:
        expected, step = self.expected, self.subject.optimizer.step
        if not self.settle() or self.reading_device:
            assert isinstance(self.attempt(step), TransitionRefused)
            return
        if self.actor.facts.phase is not None:
            fault = None  # the step also ends what an earlier one left: too much to fail at once
        before = self.seen()
        self.twin.hold(expected.contents)
        self.twin.optimizer.step()
        error = self.attempt(step, fault)
        if error is not None and not self.hit(fault):
            raise error
        if error is not None and (self.actor.facts.phase is None or self.actor.state.name == "FAULTED"):
            self.stopped(error, before, fault)  # it did not even begin
            return
        expected.begin_phase(implicit=True)
        expected.trained()
        expected.take(self.twin.contents())
        if error is not None:
            self.actor.wake_up()  # any event ends what the step left
            self.aborted()
        else:
            expected.end_phase(expected.contents, self.actor.tags[ACTOR])

    def step_that_raises(self) -> None:
        """Outside a phase it leaves an implicit one open, until the next event."""

        def closure() -> float:
            raise ArithmeticError("no loss")

        if self.expected.shown != ACTOR or self.expected.load is not None:
            return
        explicit = self.expected.phase is not None and not self.expected.leftover
        can = explicit or (self.settle() and not self.reading_device)
        error = self.attempt(lambda: self.subject.optimizer.step(closure))
        assert isinstance(error, ArithmeticError if can else TransitionRefused), error
        if can and not explicit:
            self.expected.begin_phase(implicit=True)

    @precondition(lambda self: healthy(self) and (self.expected.shown is not None or self.age % 4 == 0))
    @rule(seed=seeds, backward=st.booleans(), write=st.booleans())
    def compute(self, seed: int, backward: bool, write: bool) -> None:
        """A forward on whatever is shown, and a backward where that is allowed; perhaps after the rest was written."""
        expected = self.expected
        if write and expected.shown is not None:
            self.write_rest(seed)
        losses: list[torch.Tensor] = []
        if expected.shown is None:
            self.ask(lambda: self.subject.forward(seed), allowed=False)
        elif expected.shown == ACTOR and backward:
            self.both(lambda subject: subject.backward(seed))
            expected.backward_left |= expected.phase is None
        else:
            self.both(lambda subject: losses.append(subject.forward(seed)))
        if backward and losses:
            self.ask(losses[1].backward, allowed=False)

    def write_rest(self, value: int) -> None:
        """What is not versioned may be written at any time while awake; workspaces may be made."""
        for tensor in self.subject.rest.values():
            tensor.fill_(value)
        self.expected.rest = {name: torch.full_like(tensor, value) for name, tensor in self.expected.rest.items()}
        if self.adapter is not None:
            self.adapter.quantise()

    @precondition(lambda self: self.expected.grads)
    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        self.subject.optimizer.zero_grad(set_to_none=to_none)
        grads = self.expected.grads
        self.expected.grads = {} if to_none else {name: torch.zeros_like(grad) for name, grad in grads.items()}

    @precondition(lambda self: healthy(self) and (self.expected.grads or self.age % 4 == 0))
    @rule(fault=faults())
    def discard_grads(self, fault: Fault | None) -> None:
        if self.event("discard_grads", self.actor.discard_grads, fault=fault):
            self.expected.drop_grads()

    @precondition(lambda self: healthy(self) and self.age % 3 == 0 and not self.expected.leftover)
    @rule(fault=faults())
    def load_optimizer(self, fault: Fault | None) -> None:
        """Put in the state that was kept at the last visit, at first none."""
        expected, kept = self.expected, self.__dict__.setdefault("kept", {})
        self.twin.hold(type(expected.contents)(expected.device, expected.rest, kept))
        state = self.twin.optimizer.state_dict()
        allowed = expected.shown == ACTOR and expected.phase is None
        before, error = self.seen(), self.attempt(lambda: self.subject.optimizer.load_state_dict(state), fault)
        if not allowed:
            assert isinstance(error, TransitionRefused), error
            return
        self.kept, expected.optimizer = expected.optimizer, kept  # also where it was not heard of
        expected.safe = False
        if error is not None:
            if not self.hit(fault):
                raise error
            self.stopped(error, before, fault)

    # weights from outside

    @precondition(worthwhile("load"))
    @rule(tag=tags, fault=faults())
    def open_load(self, tag: str, fault: Fault | None) -> None:
        block = self.actor.loading(tag)
        if self.event("load", block.__enter__, tag, fault=fault):
            self.loading, self.expected.load = block, tag

    @precondition(lambda self: healthy(self) and self.expected.load is not None)
    @rule(seed=seeds, some=st.booleans())
    def write_load(self, seed: int, some: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for number, tensor in enumerate(self.subject.weights.values()):
                if tensor.is_floating_point() and (not some or number % 3 == seed % 3):
                    tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.expected.device = self.subject.contents().weights

    @precondition(lambda self: healthy(self) and self.expected.load is not None)
    @rule(raises=st.booleans(), fault=faults())
    def leave_load(self, raises: bool, fault: Fault | None) -> None:
        expected, block, tag = self.expected, self.loading, self.expected.load
        assert tag is not None
        assert expected.shown is not None
        wrong = ArithmeticError("no checkpoint")
        arguments = (type(wrong), wrong, None) if raises else (None, None, None)
        before, error = self.seen(), self.attempt(lambda: block.__exit__(*arguments), fault)
        if error is not None and not self.hit(fault):
            raise error
        if self.actor.facts.load is not None and self.actor.state.name != "FAULTED":
            self.actor._fire("abort_load")  # ending it and giving it up have both been made to fail
        written, self.loading, expected.load = expected.device, None, None
        expected.device = expected.weights[expected.shown]
        if error is None and not raises:
            expected.wrote(tag, written)
            expected.version = self.actor.tags[ACTOR]
        elif self.actor.state.name == "FAULTED":
            self.possible = {tag: [written]}
            self.fall()
        elif error is not None:
            self.stopped(error, before, fault)

    @precondition(lambda self: self.may("adopt") and self.expected.phase is None)
    @rule(
        how=st.sampled_from(("weight", "statistics", "load_state_dict", "structure")),
        then=st.sampled_from(("sleep", "begin_training")),
        undo=st.booleans(),
        fault=faults(),
    )
    def write_behind(self, how: str, then: str, undo: bool, fault: Fault | None) -> None:
        """Weights change behind the controller's back: the next event that would lose them notices."""
        expected, actor, shown = self.expected, self.actor, self.expected.shown
        if shown is None or not self.may(then):
            return
        if how == "structure":
            self.change_structure(actor.sleep if then == "sleep" else actor.begin_training)
            return
        if how == "load_state_dict" and shown != ACTOR:
            self.ask(lambda: self.subject.model.load_state_dict(expected.device), allowed=False)
            return
        self.change_behind(how)
        written, before = self.subject.contents(), self.seen()
        expected.rest = written.rest
        sharing = [tag for tag in ALL if actor.tags[tag] == actor.tags[shown]]
        error = self.attempt(actor.sleep if then == "sleep" else actor.begin_training)
        if error is None:
            assert actor.config.on_untracked == "adopt"
            expected.wrote(shown, written.weights)
            expected.version = actor.tags[ACTOR] if actor.facts.phase is None else actor.facts.phase.base
            expected.sleep() if then == "sleep" else self.begun()
            return
        if not isinstance(error, UntrackedChange):
            raise error
        assert error.tag == shown
        assert self.seen() == before
        if undo:
            self.undo(expected.device)
        else:
            self.adopt(fault, sharing)

    def change_behind(self, how: str) -> None:
        subject = self.subject
        with torch.no_grad():
            if how == "weight":
                subject.weights["left"].add_(1)
            elif how == "statistics":
                subject.forward(0, train=True)
            else:
                subject.model.load_state_dict({name: tensor + 1 for name, tensor in self.expected.device.items()})

    def undo(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                self.subject.weights[name].copy_(tensor)

    def adopt(self, fault: Fault | None, sharing: list[str]) -> None:
        """Other tags of that version may have to come along; no tag of another version may."""
        expected, actor, shown, before = self.expected, self.actor, self.expected.shown, self.seen()
        assert shown is not None
        written = self.subject.contents().weights
        error = self.attempt(actor.adopt, fault)
        if error is not None:
            if not self.hit(fault):
                raise error
            self.undo(expected.device)
            self.stopped(error, before, fault)
            return
        for tag in ALL:
            if actor.tags[tag] != before["tags"][tag]:
                assert tag in sharing
                expected.wrote(tag, written)
        expected.version = actor.tags[ACTOR]

    def change_structure(self, then: Callable[[], object]) -> None:
        """A parameter too many: refused until it is gone."""
        before, moved = self.seen(), self.moved()
        self.subject.model.register_parameter("late", torch.nn.Parameter(torch.ones(2)))
        error = self.attempt(then)
        del self.subject.model._parameters["late"]
        assert isinstance(error, ManifestError), error
        assert (self.seen(), self.moved()) == (before, moved)

    # tags, scopes, readers

    @precondition(healthy)
    @rule(tag=tags, of=tags, fault=faults())
    def move_tag(self, tag: str, of: str, fault: Fault | None) -> None:
        if self.event("tag", lambda: self.actor.tag(tag, of), tag, of, fault):
            assert self.actor.tags[tag] == self.actor.tags[of]
            self.expected.weights[tag] = self.expected.weights[of]

    @precondition(healthy)
    @rule(tag=tags, fault=faults())
    def enter_scope(self, tag: str, fault: Fault | None) -> None:
        back = self.expected.shown
        block = self.actor.hold() if tag == ACTOR else self.actor.using(tag)
        if tag == back or tag not in ALL:
            entered = self.ask(block.__enter__, allowed=tag == back)
        else:
            entered = self.event("wake_up" if back is None else "switch", block.__enter__, tag, fault=fault)
            if entered:
                self.expected.show(tag)
        if entered:
            self.scopes.append(Scope(block, back))

    @precondition(lambda self: self.scopes)
    @rule(place=st.integers(0, 3), raises=st.booleans(), fault=faults())
    def leave_scope(self, place: int, raises: bool, fault: Fault | None) -> None:
        """In any order: the last to be left goes back to where the first began."""
        scope = self.scopes[-1 - place % len(self.scopes)]
        innermost = scope is self.scopes[-1]
        if not innermost:
            self.scopes[self.scopes.index(scope) + 1].back = scope.back
        self.scopes.remove(scope)
        leave, shown, back = self.leaving(scope, raises), self.expected.shown, scope.back
        if not innermost or shown in (None, back):
            assert self.ask(leave, allowed=True)
        elif back is None:
            if self.event("sleep", leave, fault=fault):
                self.expected.sleep()
        elif self.event("switch", leave, back, fault=fault):
            self.expected.show(back)

    def leaving(self, scope: Scope, raises: bool) -> Callable[[], None]:
        """Leave it, where ``raises`` by an exception, which goes on; what fails in leaving is told in a note."""

        def leave() -> None:
            if not raises:
                scope.block.__exit__(None, None, None)
                return
            wrong = ArithmeticError("no answer")
            assert not scope.block.__exit__(type(wrong), wrong, None)
            for note in getattr(wrong, "__notes__", ()):
                assert note.startswith("leaving the scope failed too: ")
                raise TransitionRefused("leave", "", (), note) if " refused in " in note else LifecycleError(note)

        return leave

    @precondition(lambda self: healthy(self) and len(self.readers) < 2)
    @rule(tag=tags)
    def start_reading(self, tag: str) -> None:
        if tag == ACTOR and self.expected.phase is not None:
            return  # a working version may change under its reader
        block, views = self.actor.weights(tag), []
        if self.ask(lambda: views.append(block.__enter__()), allowed=tag in ALL):
            on_device = self.actor.facts.leases[-1].on_device
            assert self.expected.shown is not None or not on_device
            self.readers.append(Reader(block, views[0], self.expected.weights[tag], on_device))

    @precondition(lambda self: self.readers)
    @rule(place=st.integers(0, 2))
    def stop_reading(self, place: int) -> None:
        self.stop(self.readers[place % len(self.readers)])

    # engines

    @precondition(healthy)
    @rule(
        tag=known_tags,
        names=st.sampled_from(("a", "b", "ab", "ab")),
        rotate=st.sampled_from(ROTATIONS),
        broken=st.sampled_from((None, None, None, None, *ENGINE_METHODS)),
        victim=st.sampled_from((0, -1)),
        kind=st.sampled_from(("fails", "fails", "dies", "corrupts")),
        restart=st.sampled_from((True, True, False)),
        fault=faults(24),
    )
    def sync(
        self,
        tag: str,
        names: str,
        rotate: tuple[tuple[str, str], ...],
        broken: str | None,
        victim: int,
        kind: str,
        restart: bool,
        fault: Fault | None,
    ) -> None:
        """With a new engine in the place of one that died or holds something newer, or not."""
        engines = {name: self.engines[name] for name in names}
        for engine in engines.values():
            if restart and (not engine.alive or (engine.weight_version or 0) > self.actor.tags[tag]):
                engine.restart()
        if not self.finish_leftover(engines):
            return
        version, before, moved = self.actor.tags[tag], self.seen(), self.moved()
        held = {name: self.held(engine) for name, engine in engines.items()}
        self.break_engine(engines[names[victim]], broken, kind)
        error = self.attempt(lambda: self.actor.sync(list(engines.values()), tag, rotate), fault)
        for engine in self.engines.values():
            engine.fail_on, engine.die_on, engine.corrupted = set(), set(), set()
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
        failing = broken is not None or not all(engine.alive for engine in engines.values())
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

    def rotates_shown(self, rotate: tuple[tuple[str, str], ...], tags: Mapping[str, int]) -> bool:
        moved = dict(tags)
        for name, of in rotate:
            moved[name] = moved[of]
        return any(moved[tag] != tags[tag] for tag in {ACTOR, self.expected.shown or ACTOR})

    def held(self, engine: CopyingEngine) -> tuple[int | None, bool]:
        """Its version and whether it is paused."""
        return engine.weight_version, engine._state.snapshot()["paused"] is not None

    def break_engine(self, engine: CopyingEngine, method: str | None, kind: str) -> None:
        if method is not None and kind == "corrupts":
            engine.corrupted = {"left"}
        elif method is not None:
            (engine.die_on if kind == "dies" else engine.fail_on).add(method)

    def synced(
        self, tag: str, version: int, engines: Mapping[str, CopyingEngine], rotate: tuple[tuple[str, str], ...]
    ) -> None:
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
        """Nothing is published. Every engine goes on as before, or holds no version and stays paused.

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
                assert self.held(engine) == held[name]

    # after a fault, and the end

    @precondition(lambda self: self.faulted or self.age % 16 == 0)
    @rule(fault=faults())
    def recover(self, fault: Fault | None) -> None:
        if not self.faulted:
            self.event("recover", self.actor.recover)
            return
        before, error = self.seen(), self.attempt(self.actor.recover, fault)
        if error is None:
            self.recovered()
        elif self.hit(fault):
            self.stopped(error, before, fault)
        else:
            raise error

    @precondition(lambda self: self.age > 12)
    @rule(config=configs, host=hosts, busy=st.booleans(), fault=faults())
    def close_and_attach_again(self, config: LifecycleConfig, host: str, busy: bool, fault: Fault | None) -> None:
        self.shut(fault)
        self.attach(config, host, busy)
