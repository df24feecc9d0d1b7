"""A row of the table in words, without an actor: what ``lifecycle plan`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen

from lifecycle.actions import Call
from lifecycle.errors import TransitionRefused
from lifecycle.plan import Table, no_row
from lifecycle.versions import Facts
from states.spec import MachineSpec


@frozen
class DescribedEffect:
    """One effect as a row may run it."""

    name: str
    doc: str
    inverse: str | None
    point_of_no_return: bool


@frozen
class Described:
    """What an event may do from a state. ``refusal`` is set where the table has no such row."""

    event: str
    source: str
    target: str | None
    guards: tuple[str, ...] = ()
    effects: tuple[DescribedEffect, ...] = ()
    refusal: str | None = None
    when: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def flat_source(table: Table, text: str) -> str:
    """The flat state that users write as ``SWITCHED(ref)``, in any case. Raises ValueError naming the known ones."""
    exact = next((flat for flat, shown in table.names.items() if text in (flat, shown)), None)
    if exact is not None:
        return exact
    for flat, shown in table.names.items():
        if text.casefold() in (flat.casefold(), shown.casefold()):
            return flat
    raise ValueError(f"unknown state {text!r}; known: {', '.join(dict.fromkeys(table.names.values()))}")


def describe(spec: MachineSpec, event: str, source: str, tag: str | None, tags: Iterable[str]) -> list[Described]:
    """Every row that may answer the event there: one, or several where the facts decide.

    Raises ValueError for an unknown state, event or tag.
    """
    table = Table.of(spec, ("actor", *tags))
    flat = flat_source(table, source)
    event = "start_sync" if event == "sync" else event
    if event not in {known.name for known in spec.events}:
        raise ValueError(f"unknown event {event!r}; known: {', '.join(e.name for e in spec.events)}")
    if tag is not None and tag not in table.tags:
        raise ValueError(f"unknown tag {tag!r}; known: {', '.join(table.tags)}")
    rows = table.candidates(event, flat, tag)
    if not rows and tag is None:
        rows = table.candidates(event, flat, "actor")
    if not rows:
        refusal: TransitionRefused = no_row(table, flat, Call(event, _NO_FACTS, tag=tag))
        return [Described(event, table.names[flat], None, refusal=str(refusal))]
    return [
        Described(
            event,
            table.names[flat],
            table.names[row.target],
            tuple(f"{guard.name}: not if {guard.reason}" for guard in row.guards),
            tuple(DescribedEffect(e.name, e.doc, e.inverse, not e.undoable) for e in row.effects),
            when=", ".join([*row.row.when, *(f"not: {fact}" for fact in row.row.unless)]),
        )
        for row in rows
    ]


_NO_FACTS = Facts(tags={}, versions={}, parts={}, device={}, backups={}, resident=frozenset())
