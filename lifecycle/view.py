"""Tables for the terminal. Needs the extra ``cli``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from lifecycle.describe import Described


def show_described(found: Iterable[Described], console: Console | None = None) -> None:
    console = console or Console()
    for one in found:
        if one.refusal is not None:
            console.print(one.refusal, markup=False)
            continue
        title = f"{one.event}: {one.source} → {one.target}" + (f" ({one.when})" if one.when else "")
        table = Table(title=title, caption="; ".join(one.guards), title_style="bold")
        for heading in ("effect", "what it does", "undone by"):
            table.add_column(heading, overflow="fold")
        for effect in one.effects:
            undone = "point of no return" if effect.point_of_no_return else effect.inverse or "leaves nothing to undo"
            table.add_row(effect.name, effect.doc, undone)
        console.print(table)
