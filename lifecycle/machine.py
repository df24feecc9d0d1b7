"""The running machine: a flat ``transitions.Machine`` generated from the table, and nothing beside it.

This is the only file that imports ``transitions``. Seen on 0.9.3: a raise in ``before`` leaves the source state, a
raise in ``on_enter`` or ``after`` leaves the target; so all work happens in one ``before`` callable. No automatic
transitions, no queue, no callbacks by name. Locking is the controller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transitions import Machine

from lifecycle.plan import Table
from states.spec import FlatRow


class _Holder:
    """What ``transitions`` keeps the state in. It owns no tensors: machine, events and model form reference cycles."""

    state: str


def bare(states: list[str], rows: list[tuple[str, str, str]]) -> Any:
    """A machine of nothing but states and triggers, to compare with; returns the object that has the triggers."""
    holder = _Holder()
    Machine(
        model=holder,
        states=states,
        transitions=[list(row) for row in rows],
        initial=states[0],
        auto_transitions=False,
    )
    return holder


class RunningMachine:
    """Fires rows. ``work`` runs in between and decides, by returning or raising, whether the state changes."""

    def __init__(self, table: Table) -> None:
        self._holder = _Holder()
        self._work: Callable[[], None] | None = None
        self.transitions = Machine(
            model=self._holder,
            states=list(table.states),
            transitions=[
                {"trigger": trigger, "source": source, "dest": dest, "before": self._run}
                for trigger, source, dest in dict.fromkeys((r.trigger, r.source, r.target) for r in table.all_rows)
            ],
            initial=table.spec.initial,
            auto_transitions=False,
        )
        self._triggers: dict[str, Callable[[], bool]] = {
            trigger: getattr(self._holder, trigger) for trigger in self.transitions.events
        }

    @property
    def state(self) -> str:
        """The flat state. Readable from any thread, without a lock."""
        return self._holder.state

    def fire(self, row: FlatRow, work: Callable[[], Any]) -> None:
        """Run ``work`` and, if it returns, move to the row's target."""
        assert row.source == self.state
        self._work = work
        try:
            self._triggers[row.trigger]()
        finally:
            self._work = None

    def _run(self) -> None:
        if self._work is None:
            raise RuntimeError(
                "fire events through ActorLifecycle: a bare trigger would change the state without effects"
            )
        self._work()
