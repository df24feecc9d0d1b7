"""Showing the demo to a person: one live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from attrs import define, field

from lifecycle.demo.options import DemoOptions
from lifecycle.demo.progress import Progress, StepFigures

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from lifecycle.controller import ActorLifecycle
    from lifecycle.demo.checks import Check
    from lifecycle.demo.main import Result
    from lifecycle.demo.observe import Sample

_BAR = 24
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_STATE_STYLES = {
    "RESIDENT": "bold green",
    "SWITCHED": "bold blue",
    "ASLEEP": "bold magenta",
    "SYNCING": "bold yellow",
    "generating": "bold green",
    "ready": "green",
    "released": "bold magenta",
    "updating": "bold yellow",
}


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


@define
class PlainView:
    """A line for each thing that begins and for each step that ends."""

    stream: TextIO
    began: float = field(factory=time.monotonic)

    def phase(self, what: str) -> None:
        self._say(what)

    def step(self, figures: StepFigures) -> None:
        self._say(f"step {figures.number}: {step_line(figures)}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=self.stream, flush=True)


class Silent:
    """Told of everything, says nothing: the live view looks by itself."""

    def phase(self, what: str) -> None: ...

    def step(self, figures: StepFigures) -> None: ...


def step_line(figures: StepFigures) -> str:
    moved = mebibytes(figures.bytes["device_to_host"] + figures.bytes["host_to_device"])
    avoided = mebibytes(figures.bytes["avoided"])
    return (
        f"reward {figures.reward:.3f}, correct {figures.correct:.0%}, KL {figures.kl:.4f}, version {figures.version}, "
        f"{sum(figures.seconds.values()):.1f} s, moved {moved}, avoided {avoided}"
    )


@contextmanager
def plain_progress(options: DemoOptions, stream: TextIO) -> Iterator[Progress]:
    yield Progress(options, PlainView(stream))


@contextmanager
def live_progress(options: DemoOptions, console: Console) -> Iterator[Progress]:
    """Draws the progress four times a second while entered, and once more at the end."""
    from rich.live import Live

    progress = Progress(options, Silent())
    with Live(get_renderable=lambda: render(progress), console=console, refresh_per_second=4):
        yield progress


def render(progress: Progress) -> RenderableType:
    """The whole view, of this moment."""
    from rich.console import Group
    from rich.panel import Panel

    parts: list[RenderableType] = []
    if progress.actor is None or not progress.samples:
        parts.append(_loading(progress))
    else:
        parts += [_processes(progress.actor, progress.samples[-1]), _numbers(progress.actor, progress.options)]
    parts += [_rewards(progress.steps, progress.options.steps), _now(progress)]
    elapsed = time.monotonic() - progress.began
    title = f"lifecycle demo · {progress.title or progress.options.model} · {elapsed:.0f} s"
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))


def _table(*headers: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*headers, box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1))


def _styled(state: str) -> Any:
    from rich.text import Text

    return Text(state, style=_STATE_STYLES.get(state.split("(")[0], ""))


def _loading(progress: Progress) -> RenderableType:
    table = _table("preparing", "seconds")
    for what, seconds in progress.done:
        table.add_row(f"[green]✓[/green] {what}", f"{seconds:.1f}")
    return table


def _processes(actor: ActorLifecycle, sample: Sample) -> RenderableType:
    table = _table("process", "state", "version", "anonymous memory")
    held = "" if sample.engine_version is None else str(sample.engine_version)
    table.add_row("trainer", _styled(str(actor.state)), str(actor.tags["actor"]), mebibytes(sample.trainer_bytes))
    table.add_row("engine", _styled(sample.engine), held, mebibytes(sample.engine_bytes))
    table.add_row("host copies", "", "", mebibytes(sample.host_bytes))
    return table


def _numbers(actor: ActorLifecycle, options: DemoOptions) -> RenderableType:
    traffic, table = actor.traffic, _table("tag → version", "copied to host", "copied back", "copies avoided")
    tags = "  ".join(f"{tag} → {version}" for tag, version in actor.tags.items())
    moved = (traffic.device_to_host, traffic.host_to_device, traffic.avoided)
    table.add_row(tags, *map(mebibytes, moved))
    return table


def _rewards(steps: Sequence[StepFigures], total: int) -> RenderableType:
    table = _table("step", "reward", "", "correct", "KL", "seconds")
    for figures in steps[-8:]:
        bar = "█" * round(figures.reward * _BAR)
        took = f"{sum(figures.seconds.values()):.1f}"
        table.add_row(
            f"{figures.number} of {total}",
            f"{figures.reward:.3f}",
            f"[cyan]{bar}[/cyan]{'·' * (_BAR - len(bar))}",
            f"{figures.correct:.0%}",
            f"{figures.kl:.4f}",
            took,
        )
    return table


def _now(progress: Progress) -> RenderableType:
    from rich.text import Text

    moving = progress.actor.moving if progress.actor is not None else None
    doing = f" · {moving[0]}: {moving[1]}" if moving else ""
    seconds = time.monotonic() - progress.since
    return Text(f"{_SPINNER[int(seconds * 4) % len(_SPINNER)]} {progress.now} {seconds:.0f} s{doing}")


def check_table(checks: Sequence[Check]) -> Table:
    table = _table("", "checked", "measured", "required")
    table.columns[1].ratio = 1
    for check in checks:
        mark = "[green]✓[/green]" if check.passed else "[bold red]✗[/bold red]"
        table.add_row(mark, check.name, check.measured, check.required)
    return table


def show(result: Result, console: Console) -> None:
    """What is left to read when all is done."""
    console.print(f"rewarded: {result.task}", highlight=False)
    for figures in (result.steps[0], result.steps[-1]):
        console.print(f"an answer in step {figures.number}: {figures.example!r}", markup=False, highlight=False)
    console.print(check_table(result.checks))
    console.print("files: " + ", ".join(result.files.values()), highlight=False, soft_wrap=True)
    console.print(_verdict(result), style="bold green" if result.passed else "bold red", highlight=False)


def _verdict(result: Result) -> str:
    failed, total = sum(not check.passed for check in result.checks), len(result.checks)
    told = f"{failed} of {total} checks failed" if failed else f"all {total} checks passed"
    return f"{told}, in {result.seconds:.0f} s"
