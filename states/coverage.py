"""Whether a table answers whatever is asked: each event in each state, for each tag, however the facts are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from states.resources import AnyFact
from states.spec import MachineSpec, Match, Row


def unanswered(spec: MachineSpec) -> Iterator[str]:
    """Findings. Whether each event is answered in each state is asked of machines that list what they refuse."""
    for state in spec.states:
        for event in spec.events:
            rows = [row for row in spec.rows_from(state.name) if row.event == event.name]
            where = f"{event.name} in {state.name}"
            if rows and event.name in spec.refused_in(state.name):
                yield f"{where} is refused, and has a row"
            if not rows and spec.refused and event.name not in spec.refused_in(state.name):
                yield f"{where} has no row, and is not listed as refused"
            if event.any_tag and any(one.per_tag for one in spec.states):
                yield from _tags(where, rows)
            yield from _conditions(spec, where, rows)
    for state_name, _ in spec.refused:
        if state_name not in {state.name for state in spec.states}:
            yield f"refused in {state_name!r}: no such state"


def _tags(where: str, rows: list[Row]) -> Iterator[str]:
    """Rows for some tags call for rows for the others; of a row for the tag that is shown the others are refused."""
    matches = {row.match for row in rows}
    if matches & {Match.ACTOR, Match.OTHER} and Match.NONE not in matches:
        for missing in {Match.ACTOR, Match.OTHER} - matches:
            yield f"{where} has no row for {'tag actor' if missing is Match.ACTOR else 'other tags than actor'}"


def _conditions(spec: MachineSpec, where: str, rows: list[Row]) -> Iterator[str]:
    """However the facts are by which rows are chosen, one row must answer, or none where a machine may stay silent."""
    for match in Match:
        chosen = [row for row in rows if row.match is match]
        facts = sorted({fact for row in chosen for fact in row.when | row.unless})
        for values in product((True, False), repeat=len(facts)):
            known = dict(zip(facts, values, strict=True))
            if not chosen or not _possible(spec, chosen[0], known):
                continue
            fitting = [row for row in chosen if _fits(row, known)]
            if len(fitting) > 1 or (not fitting and spec.refused):
                told = ", ".join(f"{fact.name} {'true' if value else 'false'}" for fact, value in known.items())
                yield f"{where} ({match} tag) has {len(fitting)} rows" + (f" where {told}" if told else "")


def _possible(spec: MachineSpec, row: Row, known: dict[AnyFact, bool]) -> bool:
    """What the state's contract does not rule out."""
    state = spec.state(row.source)
    return not any(fact in (state.lacks if value else state.holds) for fact, value in known.items())


def _fits(row: Row, known: dict[AnyFact, bool]) -> bool:
    return all(known[fact] for fact in row.when) and not any(known[fact] for fact in row.unless)
