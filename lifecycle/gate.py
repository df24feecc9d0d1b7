"""What the hooks on model and optimizer ask the controller, and tell it (``adapters.base.Gate``)."""

from __future__ import annotations

import threading
from typing import Any

from attrs import evolve

from lifecycle.actions import Call
from lifecycle.errors import Faulted, TransitionRefused
from lifecycle.plan import allowed_events, holds
from lifecycle.steps import Steps
from states.resources import Fact
from states.spec import Use

_NOWHERE = Use("", (), "this machine allows it in no state", "")


class HookGate(Steps):
    """Answers from the table's uses; turns optimizer steps outside a phase into phases of one step."""

    def permit(self, operation: str) -> None:
        """Raise TransitionRefused unless the table allows this operation here."""
        use, state = self._table.uses.get(operation, _NOWHERE), self._table.states[self._machine.state]
        if Fact.WORKING in use.forbids and self._left_over():
            self._fire("abort_training")
        for fact, event in self._table.firsts.items():
            if self.facts.arriving and fact in use.forbids and self._holds(fact):
                self._fire(event)
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

    def forward_begins(self) -> None:
        """A root is called while weights are on their way: what it launches from here on sees them."""
        self._world.order_arrivals()

    def block_begins(self, number: int) -> None:
        """A block is called whose weights may be on their way: they are there, and right, when this returns."""
        if not self._world.block_arrived(number):
            self.arrive()

    def arrive(self) -> None:
        """Wait for all that is on its way. Raises what was wrong with it, and Faulted where it was found before."""
        if self._owner != threading.get_ident():  # an event's own effect: the event is its waiter
            with self._exclusive("arrive", wait=True):
                self._arrive()
        self.permit("forward")

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
