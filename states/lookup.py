"""Finding the row of an event, or why there is none, by facts alone. Pure; for machines whose rows no tag chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import field, frozen

from states.resources import AnyFact
from states.spec import SAME, Effect, Guard, MachineSpec, Row


@frozen
class Found:
    """A row that may be taken, with where it leads."""

    row: Row
    target: str
    effects: tuple[Effect, ...]


@frozen
class No:
    """Why an event is refused. ``guard`` is the guard that says so, or None where the state has no such row."""

    reason: str
    advice: str
    guard: Guard | None = None


@frozen
class Lookup:
    """A machine's rows by state and event."""

    spec: MachineSpec
    _rows: Mapping[tuple[str, str], tuple[Found, ...]] = field(repr=False)
    _guards: Mapping[str, Guard] = field(repr=False)

    @classmethod
    def of(cls, spec: MachineSpec) -> Lookup:
        rows: dict[tuple[str, str], tuple[Found, ...]] = {}
        for row in spec.rows:
            target = row.source if row.target == SAME else row.target
            found = Found(row, target, tuple(spec.effect(name) for name in row.effects))
            rows[row.source, row.event] = (*rows.get((row.source, row.event), ()), found)
        return cls(spec, rows, {guard.name: guard for guard in spec.guards})

    def find(self, state: str, event: str, true: Collection[AnyFact]) -> Found | No:
        """What the event does in this state while exactly these facts are true."""
        for found in self._rows.get((state, event), ()):
            if found.row.when.issubset(true) and found.row.unless.isdisjoint(true):
                return self._refused(found.row, true) or found
        return No(f"not possible in {state}", self.spec.advice_for(event, state))

    def allowed(self, state: str, true: Collection[AnyFact]) -> tuple[str, ...]:
        """Events that callers may ask for in this state while these facts are true, in the order of the table."""
        events = (event.name for event in self.spec.events if not event.internal)
        return tuple(event for event in events if isinstance(self.find(state, event, true), Found))

    def _refused(self, row: Row, true: Collection[AnyFact]) -> No | None:
        for guard in (self._guards[name] for name in row.guards):
            if not (guard.requires.issubset(true) and guard.forbids.isdisjoint(true)):
                return No(guard.reason, guard.advice, guard)
        return None
