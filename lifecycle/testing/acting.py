"""What can be done with a driven actor, each together with what must have come of it.

Ordinary code may call these too, for instance to repeat a sequence that ``lifecycle.testing.stateful`` found::

    acting = Acting()
    acting.prepare("adamw")
    acting.attach(LifecycleConfig(), "pinned", busy=False)
    acting.go("ref")
    acting.check()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lifecycle.errors import LifecycleError, ManifestError, TransitionRefused, UntrackedChange
from lifecycle.testing.checking import Checking
from lifecycle.testing.driving import ALL
from lifecycle.testing.expectation import Reader, Scope
from lifecycle.testing.subjects import Contents
from lifecycle.testing.trouble import Fault
from lifecycle.versions import ACTOR


class Acting(Checking):
    """Moving, training, loading, tags, scopes and readers. A ``fault`` makes the event fail where it says."""

    def make_distinct(self) -> None:
        """Every tag gets weights of its own; those of 'actor' are on the device alone."""
        self.open_load("ref")
        self.write_load(0)
        self.leave_load()
        self.training(1, 0)
        self.move_tag("old", ACTOR)
        self.training(1, 1)

    # moving

    def go(self, to: str | None, fault: Fault | None = None, room: int | None = None, otherwise: bool = False) -> None:
        """To sleep (None), or to a tag by the verb that leads there, or ``otherwise`` by the other one."""
        asleep = self.expected.shown is None
        if to is None:
            self.sleep(fault)
        elif asleep != otherwise:
            self.wake_up(to, fault, room)
        else:
            self.switch(to, fault)

    def sleep(self, fault: Fault | None = None) -> None:
        expected, before, pure = self.expected, self.copied_out(), self.expected.copied
        asleep = expected.shown is None
        if self.event("sleep", self.actor.sleep, fault=fault) and not asleep:
            assert not pure or self.copied_out() == before, "copied out once more"
            expected.sleep()

    def wake_up(self, tag: str, fault: Fault | None = None, room: int | None = None) -> None:
        asleep, self.arena.room = self.expected.shown is None, room
        fits = room is None or not asleep
        stream = self.age % 3 == 0
        if self.event("wake_up", lambda: self.actor.wake_up(tag, stream), tag, fault=fault, allowed=fits) and asleep:
            self.expected.show(tag)
        self.arena.room = None

    def switch(self, tag: str, fault: Fault | None = None) -> None:
        expected, versions, before = self.expected, self.actor.tags, self.moved()
        one_version = versions.get(tag) == versions.get(expected.shown or "") and not expected.leftover
        if self.event("switch", lambda: self.actor.switch(tag), tag, fault=fault):
            if one_version and (expected.optimizer_there or tag != ACTOR):
                assert self.moved() == before, "moved bytes between tags of one version"
            if tag != expected.shown:
                expected.show(tag)

    # training

    def begin_training(self, fault: Fault | None = None) -> None:
        if self.event("begin_training", self.actor.begin_training, fault=fault):
            self.begun()

    def end_training(self, abort: bool = False, fault: Fault | None = None) -> None:
        if abort:
            if self.event("abort_training", self.actor.abort_training, fault=fault):
                self.aborted()
        elif self.event("end_training", self.actor.end_training, fault=fault):
            self.expected.end_phase(self.expected.contents, self.actor.tags[ACTOR])

    def training(self, steps: int, seed: int, raises: bool = False) -> None:
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

    def step(self, seed: int, raises: bool = False, fault: Fault | None = None) -> None:
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

    def implicit_step(self, fault: Fault | None = None) -> None:
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

    def compute(self, seed: int, backward: bool = False, write: bool = False) -> None:
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

    def drop_grads(self, how: str, fault: Fault | None = None) -> None:
        """By the controller, or by the owner, to None or to zeros."""
        expected = self.expected
        if how == "discard":
            if self.event("discard_grads", self.actor.discard_grads, fault=fault):
                expected.drop_grads()
            return
        self.subject.optimizer.zero_grad(set_to_none=how == "none")
        zeros = {name: torch.zeros_like(grad) for name, grad in expected.grads.items()}
        expected.grads = {} if how == "none" else zeros

    def load_optimizer(self, fault: Fault | None = None) -> None:
        """Put in the state that was kept at the last visit, at first none."""
        expected, kept = self.expected, self.kept
        self.twin.hold(Contents(expected.device, expected.rest, kept))
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

    def open_load(self, tag: str, fault: Fault | None = None) -> None:
        block = self.actor.loading(tag)
        if self.event("load", block.__enter__, tag, fault=fault):
            self.loading, self.expected.load = block, tag

    def write_load(self, seed: int, some: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for number, tensor in enumerate(self.subject.weights.values()):
                if tensor.is_floating_point() and (not some or number % 3 == seed % 3):
                    tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.expected.device = self.subject.contents().weights

    def leave_load(self, raises: bool = False, fault: Fault | None = None) -> None:
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

    def write_behind(self, how: str, then: str, undo: bool = False, fault: Fault | None = None) -> None:
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
                with self.actor.using(self.expected.shown or ACTOR):  # weights on their way first: no hook hears this
                    next(t for t in subject.weights.values() if t.requires_grad).add_(1)
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

    def move_tag(self, tag: str, of: str, fault: Fault | None = None) -> None:
        if self.event("tag", lambda: self.actor.tag(tag, of), tag, of, fault):
            assert self.actor.tags[tag] == self.actor.tags[of]
            self.expected.weights[tag] = self.expected.weights[of]

    def enter_scope(self, tag: str, fault: Fault | None = None) -> None:
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

    def leave_scope(self, place: int = 0, raises: bool = False, fault: Fault | None = None) -> None:
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

    def start_reading(self, tag: str) -> None:
        if tag == ACTOR and self.expected.phase is not None:
            return  # a working version may change under its reader
        block, views = self.actor.weights(tag), []
        if self.ask(lambda: views.append(block.__enter__()), allowed=tag in ALL):
            on_device = self.actor.facts.leases[-1].on_device
            assert self.expected.shown is not None or not on_device
            self.readers.append(Reader(block, views[0], self.expected.weights[tag], on_device))

    def stop_reading(self, place: int = 0) -> None:
        self.stop(self.readers[place % len(self.readers)])

    # after a fault, and the end

    def recover(self, fault: Fault | None = None) -> None:
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
