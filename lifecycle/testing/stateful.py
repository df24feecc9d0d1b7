"""A Hypothesis state machine that drives a real controller on a real backend, against a dictionary of tensors.

What is expected (``lifecycle.testing.expectation``) is written from the documentation alone: which events may happen
when, and what every tag's weights are then. What a training step makes is computed on a twin of the model that nobody
controls. After every rule all that can be read is compared with it, bit for bit.

Test an actor of your own by saying how to make it (twice the same, and it must be deterministic)::

    class MyMachine(LifecycleMachine):
        def make_subject(self, optimizer: str) -> Subject: ...

    TestMyActor = MyMachine.TestCase
    TestMyActor.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

and a machine of your own by naming it (``machine``), its handlers (``perform``), and rules for its events that call
``own_event``: see ``docs/extending.md``.
"""

from __future__ import annotations

import sys

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import LifecycleConfig
from lifecycle.testing.acting import Acting
from lifecycle.testing.driving import ALL
from lifecycle.testing.syncing import METHODS, EngineTrouble, Rotation, Syncing
from lifecycle.testing.trouble import Fault
from lifecycle.versions import ACTOR

tags = st.sampled_from((*ALL, *ALL, *ALL, "nobody"))
seeds = st.integers(0, 3)
rarely = st.sampled_from((False, False, False, False, False, True))
hosts = st.sampled_from(("shared", "pinned"))
rotations = st.sampled_from(((), (), (("old", ACTOR),), (("old", "ref"), ("ref", ACTOR)), (("ref", "old"),)))
troubles = st.builds(
    EngineTrouble, st.sampled_from(METHODS), st.sampled_from((0, -1)), st.sampled_from(("fails", "dies", "corrupts"))
)
configs = st.builds(
    LifecycleConfig,
    on_abort=st.sampled_from(("restore", "keep")),
    on_untracked=st.sampled_from(("refuse", "adopt")),
    keep=st.sampled_from(((), (), (), ("optimizer",), ("grads",), ("rest",))),
    protect_copies=st.just(True),
)


@st.composite
def faults(draw: st.DrawFn) -> Fault | None:
    """Mostly none; else one of an event's actions fails, before or after it has acted, or the store has no room."""
    if draw(st.integers(0, 4)) < 4:
        return None
    at, error = draw(st.integers(0, 23)), draw(st.sampled_from((RuntimeError, OSError, KeyboardInterrupt)))
    return Fault(at, ran=draw(st.booleans()), again=draw(st.sampled_from((False, False, True))), error=error)


def healthy(machine: Acting) -> bool:
    return not machine.faulted


class LifecycleMachine(Acting, Syncing, RuleBasedStateMachine):
    """See the module. Override ``make_subject``, ``make_memory`` and ``make_host`` to test something else.

    The rules are few, each with several ways, because every run leaves some rules out.
    """

    @initialize(
        config=configs,
        host=hosts,
        optimizer=st.sampled_from(("adamw", "sgd")),
        busy=st.booleans(),
        distinct=st.booleans(),
    )
    def start(self, config: LifecycleConfig, host: str, optimizer: str, busy: bool, distinct: bool) -> None:
        self.prepare(optimizer)
        self.attach(config, host, busy)
        if distinct:
            self.make_distinct()

    def teardown(self) -> None:
        if hasattr(self, "actor") and sys.exc_info()[0] is None:
            self.shut()

    @invariant()
    def holds(self) -> None:
        self.check()
        if self.faulted and self.age % 4 == 0:  # whatever rules this run leaves out
            self.recover(None)
            self.check()

    @precondition(healthy)
    @rule(
        to=st.sampled_from((None, None, None, *ALL, *ALL, "nobody")),
        room=st.sampled_from((None, None, None, 0)),
        otherwise=rarely,
        fault=faults(),
    )
    def move(self, to: str | None, room: int | None, otherwise: bool, fault: Fault | None) -> None:
        self.go(to, fault, room, otherwise)

    @precondition(healthy)
    @rule(how=st.sampled_from(("end", "abort")), otherwise=rarely, fault=faults())
    def phase(self, how: str, otherwise: bool, fault: Fault | None) -> None:
        """Begin one, or end the open one; ``otherwise`` the other of these."""
        if (self.expected.phase is None) != otherwise:
            self.begin_training(fault)
        else:
            self.end_training(how == "abort", fault)

    @precondition(lambda self: self.may("begin_training") and self.age % 2 == 0)
    @rule(steps=st.integers(0, 2), seed=seeds, raises=st.booleans())
    def whole_phase(self, steps: int, seed: int, raises: bool) -> None:
        self.training(steps, seed, raises)

    @precondition(healthy)
    @rule(seed=seeds, raises=rarely, fault=faults())
    def optimizer_step(self, seed: int, raises: bool, fault: Fault | None) -> None:
        self.step(seed, raises, fault)

    @precondition(healthy)
    @rule(seed=seeds, backward=st.booleans(), write=st.booleans())
    def forward(self, seed: int, backward: bool, write: bool) -> None:
        self.compute(seed, backward, write)

    @precondition(lambda self: healthy(self) and self.expected.grads)
    @rule(how=st.sampled_from(("discard", "none", "zeros")), fault=faults())
    def forget_grads(self, how: str, fault: Fault | None) -> None:
        self.drop_grads(how, fault)

    @precondition(lambda self: healthy(self) and not self.expected.leftover and self.age % 3 == 0)
    @rule(fault=faults())
    def exchange_optimizer_state(self, fault: Fault | None) -> None:
        self.load_optimizer(fault)

    @precondition(healthy)
    @rule(
        tag=tags,
        seed=seeds,
        how=st.sampled_from(("write", "write some", "leave", "leave", "raise")),
        otherwise=rarely,
        fault=faults(),
    )
    def load(self, tag: str, seed: int, how: str, otherwise: bool, fault: Fault | None) -> None:
        """Open one, or go on with the open one; ``otherwise`` open another one in it."""
        if self.expected.load is None or otherwise:
            self.open_load(tag, fault)
        elif how.startswith("write"):
            self.write_load(seed, some=how == "write some")
        else:
            self.leave_load(how == "raise", fault)

    @precondition(lambda self: self.may("adopt") and self.expected.phase is None)
    @rule(
        how=st.sampled_from(("weight", "statistics", "load_state_dict", "structure")),
        then=st.sampled_from(("sleep", "begin_training")),
        undo=st.booleans(),
        fault=faults(),
    )
    def change(self, how: str, then: str, undo: bool, fault: Fault | None) -> None:
        self.write_behind(how, then, undo, fault)

    @precondition(healthy)
    @rule(tag=tags, of=tags, fault=faults())
    def point(self, tag: str, of: str, fault: Fault | None) -> None:
        self.move_tag(tag, of, fault)

    @rule(enter=st.booleans(), tag=tags, place=st.integers(0, 3), raises=st.booleans(), fault=faults())
    def scope(self, enter: bool, tag: str, place: int, raises: bool, fault: Fault | None) -> None:
        if self.scopes and not enter:
            self.leave_scope(place, raises, fault)
        elif not self.faulted:
            self.enter_scope(tag, fault)

    @rule(start=st.booleans(), tag=tags, place=st.integers(0, 2))
    def reader(self, start: bool, tag: str, place: int) -> None:
        if self.readers and not start:
            self.stop_reading(place)
        elif not self.faulted and len(self.readers) < 2:
            self.start_reading(tag)

    @precondition(healthy)
    @rule(
        tag=st.sampled_from(ALL),
        names=st.sampled_from(("a", "b", "ab", "ab")),
        rotate=rotations,
        trouble=st.none() | troubles,
        restart=st.sampled_from((True, True, False)),
        fault=faults(),
    )
    def push(
        self,
        tag: str,
        names: str,
        rotate: Rotation,
        trouble: EngineTrouble | None,
        restart: bool,
        fault: Fault | None,
    ) -> None:
        self.sync(tag, names, rotate, trouble, restart, fault)

    @precondition(lambda self: self.faulted or self.age % 16 == 0)
    @rule(fault=faults())
    def mend(self, fault: Fault | None) -> None:
        self.recover(fault)

    @precondition(lambda self: self.age > 12)
    @rule(config=configs, host=hosts, busy=st.booleans(), fault=faults())
    def close_and_attach_again(self, config: LifecycleConfig, host: str, busy: bool, fault: Fault | None) -> None:
        self.shut(fault)
        self.attach(config, host, busy)
