"""``lifecycle check``: is there any way to break what this machine promises?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attrs import frozen

from lifecycle.checker.colocated import program_of
from lifecycle.checker.declared import find_model, sized
from lifecycle.checker.ranks import RankedReport, Ranks
from lifecycle.checker.report import Report, check
from lifecycle.errors import LifecycleError
from states.spec import DefinitionError


@frozen
class CheckOptions:
    """What the command line asks for. None leaves the model's own instance."""

    machine: str = "actor"
    tags: tuple[str, ...] | None = None
    engines: int | None = None
    slots: int | None = None
    reduce: bool = False
    every: bool = False
    limit: int | None = None
    ranks: int = 1
    spin: bool = False
    promela: bool = False
    trace: Path | None = None
    as_json: bool = False


def command(options: CheckOptions) -> int:
    """Prints the report. Returns 0, 1 for a finding or an unfinished search, or 2 after saying what was wrong."""
    try:
        if options.promela or options.spin:
            return _by_spin(options)
        report = _report(options)
    except DefinitionError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, LifecycleError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.as_json:
        print(json.dumps(report.to_plain(), indent=2))
    else:
        from lifecycle.checker.view import show_report

        show_report(report)
    if options.trace is not None and report.findings:
        try:
            options.trace.write_text(json.dumps(report.findings[0].to_plain(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"the trace could not be written: {error}", file=sys.stderr)
            return 2
    return 0 if report.complete and not report.findings else 1


def _by_spin(options: CheckOptions) -> int:
    """The model as Promela, or Spin's verdict beside ours."""
    from lifecycle.checker.promela import promela
    from lifecycle.checker.spin_command import show_spin, spin_table, to_plain

    if options.ranks > 1 or options.trace is not None:
        raise ValueError(
            "Spin is given one rank, and its counter-examples are not written: leave out --ranks and --trace"
        )
    model = sized(find_model(options.machine), options.tags, options.engines, options.slots)
    if options.promela:
        print(promela(program_of(model)), end="")
        return 0
    rows = spin_table({options.machine: model})
    if options.as_json:
        print(json.dumps(to_plain(rows), indent=2))
    else:
        show_spin(rows)
    return 0 if all(row.agree and row.ours is None for row in rows) else 1


def _report(options: CheckOptions) -> Report | RankedReport:
    from lifecycle.checker.view import shown_progress

    model = sized(find_model(options.machine), options.tags, options.engines, options.slots)
    with shown_progress(not options.as_json) as progress:
        if options.ranks > 1:
            return Ranks(model, options.ranks).explore(options.limit, progress)
        return check(model, options.reduce, not options.every, options.limit, progress)
