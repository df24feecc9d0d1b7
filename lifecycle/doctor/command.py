"""``lifecycle doctor``: look, measure, show. Needs the extra ``cli``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lifecycle.doctor.examine import examine, this_machine
from lifecycle.doctor.finding import Section, Status, worst

_STYLE = {Status.OK: "green", Status.NOTE: "cyan", Status.WARNING: "yellow", Status.ERROR: "bold red"}
_PAGE = 140  # columns where there is no terminal to ask


def command(as_json: bool, measure: bool) -> int:
    """1 where there is an error, else 0. With ``as_json`` standard output is one JSON document and nothing else."""
    with _progress(quiet=as_json) as tell:
        tell("looking at this machine")
        machine = this_machine()
        sections = examine(machine)
        if measure:
            from lifecycle.doctor import speed

            sections += (speed.measure(machine.torch, machine.cuda is not None, tell),)
    if as_json:
        print(json.dumps(document(sections), indent=2))
    else:
        show(sections, Console(width=None if sys.stdout.isatty() else _PAGE))
    return 1 if worst(sections) is Status.ERROR else 0


def document(sections: Sequence[Section]) -> dict[str, object]:
    """For programs: the gravest status, and the findings by section."""
    return {
        "status": worst(sections).value,
        "sections": {section.title: [one.to_plain() for one in section.findings] for section in sections},
    }


def show(sections: Sequence[Section], console: Console) -> None:
    table = Table(title="lifecycle doctor", title_style="bold")
    for heading in ("", "what", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for section in sections:
        table.add_section()
        for index, one in enumerate(section.findings):
            title = Text("" if index else section.title, style="bold")
            status = Text(one.status, style=_STYLE[one.status])
            table.add_row(title, Text(one.name), status, Text(one.found), Text(one.advice))
    console.print(table)
    console.print(_summary(sections), markup=False)


def _summary(sections: Sequence[Section]) -> str:
    counts = Counter(one.status for section in sections for one in section.findings)
    told = ", ".join(f"{status}: {counts[status]}" for status in reversed(Status) if counts[status])
    return f"{told}. {_VERDICT[worst(sections)]}"


_VERDICT = {
    Status.OK: "Nothing to do.",
    Status.NOTE: "Nothing is wrong.",
    Status.WARNING: "It works here, with less than this machine could do.",
    Status.ERROR: "It will not work well here before the errors are mended.",
}


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being done: live on a terminal, else a line each, unless ``quiet``."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as live:
            yield lambda what: live.update(f"{what} …")
    else:
        yield lambda what: None if quiet else print(f"{what} …", file=sys.stderr)
