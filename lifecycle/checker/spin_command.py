"""Spin's verdicts and state counts beside ours: as rows, as JSON, as a table on the terminal or in Markdown.

``python -m lifecycle.checker.spin_command --markdown`` compares the project's own machines, on instances that small
steps can be counted for, and with ``--folder tests/checker/machines`` the broken ones that are kept there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from lifecycle.checker.colocated import program_of
from lifecycle.checker.declared import models
from lifecycle.checker.explore import explore
from lifecycle.checker.ground import Model
from lifecycle.checker.promela import NOT_EXPRESSIBLE
from lifecycle.checker.small_steps import count
from lifecycle.checker.spin import run_spin
from lifecycle.errors import LifecycleError

#: With more resting states than this, single steps are not counted: in Python that takes minutes.
STEPS_COUNTED_TO = 10_000


@frozen
class Row:
    """One machine, checked twice. ``invariant``: what both were asked, or "all".

    ``ours`` and ``spin`` are the invariant found to be broken, or None; ``spin`` is "not expressible" where Spin can
    not be asked. Counts are of a complete search, and so None where one found something: Spin stops there, and so do
    we. ``states`` are resting states and every moment of every event; ours come from ``small_steps``.
    """

    machine: str
    tags: tuple[str, ...]
    engines: tuple[str, ...]
    slots: tuple[str, ...]
    invariant: str
    ours: str | None
    spin: str | None
    resting_ours: int | None
    resting_spin: int | None
    states_ours: int | None
    states_spin: int | None
    seconds_ours: float
    seconds_spin: float
    version: str
    agree: bool

    @property
    def instance(self) -> str:
        parts = (", ".join(self.tags), ", ".join(self.engines) or "no engine", ", ".join(self.slots))
        return " / ".join(parts)


def spin_table(named: Mapping[str, Model], steps_counted_to: int = STEPS_COUNTED_TO) -> list[Row]:
    """Compare each machine. Raises SpinMissing, SpinFailed, and ValueError where an effect has no meaning."""
    return [compared(name, model, steps_counted_to) for name, model in named.items()]


def compared(name: str, model: Model, steps_counted_to: int = STEPS_COUNTED_TO) -> Row:
    """What we find first is asked of Spin alone, since that searches in another order; else Spin is asked for all."""
    program, one = program_of(model), model.instance
    began = time.monotonic()
    found = explore(program)
    seconds = time.monotonic() - began
    ours = next(iter(found.broken), None)
    asked = ours if ours not in NOT_EXPRESSIBLE else None
    verdict = run_spin(program, asked)
    complete = asked is None and verdict.broken is None
    resting = len(found.parents)
    states = count(program).states if complete and resting <= steps_counted_to else None
    return Row(
        name,
        one.all_tags,
        one.engines,
        one.slots,
        ours or "all",
        ours,
        "not expressible" if ours in NOT_EXPRESSIBLE and complete else verdict.broken,
        resting if complete else None,
        verdict.resting if complete else None,
        states,
        verdict.states if complete else None,
        round(seconds, 2),
        round(verdict.seconds, 2),
        verdict.version,
        verdict.broken == asked
        and (not complete or verdict.resting == resting)
        and (states is None or verdict.states == states),
    )


# what is compared by default


def own_models() -> dict[str, Model]:
    """The project's machines; the actor's in every small instance."""
    found = models()
    actor = found.pop("actor")
    small = {}
    for tags in ((), ("ref",)):
        for engines in ((), ("a",)):
            for slots in (("trained",), ("frozen", "trained")):
                name = f"actor, {len(tags) + 1} tags, {len(engines)} engines, {len(slots)} slots"
                small[name] = evolve(actor, instance=evolve(actor.instance, tags=tags, engines=engines, slots=slots))
    return {**small, **found}


def models_in(folder: Path) -> dict[str, Model]:
    """Every MACHINE of the modules in a folder under the working directory, which has to be on the import path."""
    package = ".".join(folder.parts)
    modules = ((path.stem, import_module(f"{package}.{path.stem}")) for path in sorted(folder.glob("[!_]*.py")))
    return {name: module.MACHINE for name, module in modules if isinstance(getattr(module, "MACHINE", None), Model)}


# output


def to_plain(rows: Iterable[Row]) -> dict[str, Any]:
    """For programs."""
    return {"rows": [asdict(row) for row in rows]}


_HEADINGS = ("machine", "tags / engines / slots", "asked", "ours", "Spin", "resting", "all states", "seconds", "agree")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.machine.split(",")[0],
        row.instance,
        row.invariant,
        "broken" if row.ours else "holds",
        {None: "holds", "not expressible": "not expressible"}.get(row.spin, "broken"),
        _pair(row.resting_ours, row.resting_spin),
        _pair(row.states_ours, row.states_spin),
        f"{row.seconds_ours:.1f} / {row.seconds_spin:.1f}",
        "yes" if row.agree else "NO",
    )


def _pair(ours: int | None, spin: int | None) -> str:
    return " / ".join("-" if one is None else f"{one:,}" for one in (ours, spin)) if spin is not None else ""


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table; pairs are ours and Spin's."""
    yield f"| {' | '.join(_HEADINGS)} |"
    yield f"|{'---|' * len(_HEADINGS)}"
    yield from (f"| {' | '.join(_cells(row))} |" for row in rows)


def show_spin(rows: Sequence[Row]) -> None:
    """The table on the terminal. Needs the extra ``cli``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="pairs are ours / Spin's")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row), style=None if row.agree else "bold red")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 where Spin and we disagree, or 2 after saying what was wrong."""
    parser = argparse.ArgumentParser(prog="python -m lifecycle.checker.spin_command", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--folder", type=Path, help="compare the machines in this folder, too")
    parser.add_argument("--steps-counted-to", type=int, default=STEPS_COUNTED_TO, help="resting states")
    options = parser.parse_args(arguments)
    try:
        named = {**own_models(), **(models_in(options.folder) if options.folder else {})}
        rows = spin_table(named, options.steps_counted_to)
    except (ValueError, LifecycleError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(to_plain(rows), indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        print("\n".join(markdown(rows)))
    else:
        show_spin(rows)
    return 0 if all(row.agree for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
