"""A result as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from lifecycle.bench.machine import machine_in_words
from lifecycle.bench.result import Accepted, Bar, Group, Result, amount, digits

WIDTH = 140  # columns, where the output is no terminal


def show(result: Result, console: Console | None = None) -> None:
    console = console or Console(width=None if Console().is_terminal else WIDTH)
    console.print(f"{result.bench}: {machine_in_words(dict(result.machine))}", style="bold", markup=False)
    for group in result.groups:
        console.print(_table(group))
    for event, effects in result.figures.get("effects", {}).items():
        if effects:
            console.print(f"{event}: {_split(effects)}", markup=False)
    if result.accepted:
        console.print(_lines(result.accepted))
    for reason in result.left_out:
        console.print(f"left out: {reason}", markup=False)
    for note in result.notes:
        console.print(note, markup=False)


def _split(effects: Mapping[str, Mapping[str, float]]) -> str:
    """Where an event's time went, by its journal."""
    return ", ".join(f"{name} {amount(effect['seconds'], 's')}" for name, effect in effects.items())


def _table(group: Group) -> Table:
    table = Table(title=group.title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("median", "least", "most", "of the limit"):
        table.add_column(heading, justify="right")
    table.add_column("rounds", justify="right")
    table.add_column("")
    for bar in group.bars:
        table.add_row(*_row(bar, group))
    if group.limit is not None:
        table.add_row(
            f"limit: {group.limit_name}", amount(group.limit, group.unit), "", "", "1.00", "", "", style="dim"
        )
    return table


def _row(bar: Bar, group: Group) -> tuple[str, ...]:
    of_limit = digits(bar.value / group.limit) if group.limit else ""
    values = (amount(value, group.unit) for value in (bar.value, min(bar.values), max(bar.values)))
    return bar.name, *values, of_limit, str(len(bar.values)), bar.note


def _lines(accepted: tuple[Accepted, ...]) -> Table:
    table = Table(title="what was promised", title_justify="left", title_style="bold")
    for heading in ("line", "wanted", "got", ""):
        table.add_column(heading, justify="left" if heading == "line" else "right")
    for line in accepted:
        wanted = f"{line.operator} {line.wanted:.6g} {line.unit}".rstrip()
        table.add_row(line.line, wanted, f"{line.got:.6g}", "yes" if line.ok else "NO")
    return table
