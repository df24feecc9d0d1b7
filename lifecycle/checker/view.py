"""What a check found, for people. Needs the extra ``cli``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lifecycle.checker.ranks import RankedReport
from lifecycle.checker.report import Report
from lifecycle.checker.trace import Change, Step, Trace

_MARKS = {"done": "✓", "failed": "✗", "undone": "↶"}


def show_report(report: Report | RankedReport, console: Console | None = None) -> None:
    """A short verdict, then every counter-example as a table."""
    console = console or Console()
    if isinstance(report, RankedReport):
        _show_ranked(report, console)
        return
    instance = f"tags {', '.join(report.tags)}; {len(report.engines)} engines; {len(report.slots)} kinds of weights"
    console.print(f"{report.machine}: {instance}" + ("; up to renaming" if report.reduced else ""), markup=False)
    console.print(
        f"{report.states:,} states, {report.moves:,} moves, {report.steps:,} steps run in {report.seconds:.1f} s"
        + ("" if report.complete else "; stopped at the limit, so nothing is proved"),
        highlight=False,
    )
    for trace in report.findings:
        console.print()
        show_trace(trace, console)
    if not report.findings and report.complete:
        console.print(f"no finding: {len(report.invariants)} invariants hold, whatever fails", style="bold")


def _show_ranked(report: RankedReport, console: Console) -> None:
    console.print(
        f"{report.machine} on {report.ranks} ranks, of which {report.failures} fail by themselves in one event: "
        f"{report.states:,} states, {report.moves:,} moves in {report.seconds:.1f} s"
        + ("" if report.complete else "; stopped at the limit, so nothing is proved"),
        highlight=False,
    )
    for trace in report.findings:
        show_trace(trace, console)
    if not report.findings and report.complete:
        console.print("no finding: ranks rest in one state, and every rank keeps its invariants", style="bold")


def show_trace(trace: Trace, console: Console | None = None) -> None:
    """One row per step: the event, where it went, its effects, and the facts that changed."""
    console = console or Console()
    table = Table(title=f"{trace.machine}: {trace.invariant} is broken in {len(trace)} steps", title_style="bold")
    for heading in ("", "event", "from → to", "effects", "facts that changed"):
        table.add_column(heading, overflow="fold")
    for number, step in enumerate(trace.steps, 1):
        table.add_row(str(number), _event(step), _way(step), Text(_effects(step)), Text("\n".join(_facts(step))))
    console.print(table)
    console.print(Text(f"broken: {trace.detail}"))
    console.print(Text(f"why it matters: {trace.why}"))


def _event(step: Step) -> Text:
    return Text(f"{step.event}({step.tag})" if step.tag else step.event)


def _way(step: Step) -> Text:
    arrow = {"done": "→", "undone": "↶ stays, would be", "fault": "⚡", "stopped": "→"}[step.outcome]
    return Text(f"{step.source} {arrow} {step.target}")


def _effects(step: Step) -> str:
    return "\n".join(f"{_MARKS[one.outcome]} {one.name}" for one in step.effects if one.name)


def _facts(step: Step) -> Iterator[str]:
    for effect in step.effects:
        yield from (_fact(change) for change in effect.changes)


def _fact(change: Change) -> str:
    return f"{'+' if change.after else '−'} {change.fact}"


@contextmanager
def shown_progress(wanted: bool) -> Iterator[Callable[[int, int, int], None] | None]:
    """Progress on the terminal's error stream while an exploration runs."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("exploring", total=None)

        def tell(states: int, waiting: int, steps: int) -> None:
            bar.update(task, description=f"{states:,} states, {waiting:,} to explore, {steps:,} steps run")

        yield tell
