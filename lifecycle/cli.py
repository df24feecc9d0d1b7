"""The command line. One function per command; what a command needs is imported inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lifecycle.bench.commands import bench
from lifecycle.demo.options import DemoOptions, ModelName
from lifecycle.render.options import Detail, Format

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.add_typer(bench, name="bench")

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]


@app.callback()
def lifecycle() -> None:
    """The life cycle of a training actor in RL post-training, as one declared state machine."""


@app.command()
def demo(
    model: Annotated[ModelName, typer.Option(help="A real model, or one made in a moment.")] = ModelName.SMOLLM2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of generate, train, sync, sleep.")] = 5,
    samples: Annotated[int, typer.Option(min=2, help="Answers sampled in each step.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 24,
    lr: Annotated[float | None, typer.Option(help="Learning rate; by default the model's own.")] = None,
    kl: Annotated[float, typer.Option(min=0.0, help="Weight of the divergence from 'ref'.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the journal and the picture.")] = Path("demo-output"),
    as_json: _Json = False,
) -> None:
    """Post-train a small language model for a few steps, and check what the life cycle promises.

    Exits with 1 when a check fails, and with 2 when the demo can not run.
    """
    from lifecycle.demo.command import command

    try:
        options = DemoOptions(
            model=model, steps=steps, samples=samples, tokens=tokens, lr=lr, kl=kl, seed=seed, output=output
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(command(options, as_json))


@app.command()
def plan(
    event: Annotated[str, typer.Argument(help="sleep, wake_up, switch, begin_training, sync, …")],
    source: Annotated[str, typer.Option("--from", help="The state, such as ASLEEP or 'SWITCHED(ref)'.")],
    tag: Annotated[str | None, typer.Option(help="The event's tag, where it has one.")] = None,
    tags: Annotated[str, typer.Option(help="Declared tags beside 'actor', with commas between.")] = "ref",
    machine: Annotated[str, typer.Option(help="actor, frozen, or one of your own: MODULE:NAME.")] = "actor",
    as_json: _Json = False,
) -> None:
    """What an event does from a state, by the table: guards, and effects in order. Exits with 1 if it is refused."""
    from lifecycle.describe import describe
    from lifecycle.load import find_machine
    from lifecycle.view import show_described

    try:
        found = describe(find_machine(machine), event, source, tag, [name for name in tags.split(",") if name])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps([one.to_plain() for one in found], indent=2))
    else:
        show_described(found)
    raise typer.Exit(1 if found[0].refusal else 0)


@app.command()
def diagram(
    machine: Annotated[
        str, typer.Argument(help="actor, frozen, rollout, joint, or one of your own: MODULE:NAME.")
    ] = "actor",
    kind: Annotated[Format, typer.Option("--format", help="png and pdf need --output.")] = Format.SVG,
    detail: Annotated[Detail, typer.Option(help="How much is told.")] = Detail.STATES,
    highlight: Annotated[Path | None, typer.Option(help="A trace as JSON, as `check` writes it.")] = None,
    tags: Annotated[str | None, typer.Option(help="Declared tags beside 'actor', with commas between.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file; by default the standard output.")] = None,
) -> None:
    """Draw a machine from its table. Exits with 2 when it can not be drawn."""
    from lifecycle.render.command import command

    raise typer.Exit(command(machine, kind, detail, highlight, tags, output))


@app.command()
def check(
    machine: Annotated[
        str, typer.Argument(help="actor, frozen, rollout, colocated, or your own: MODULE:NAME.")
    ] = "actor",
    tags: Annotated[str | None, typer.Option(help="Tags beside 'actor', with commas between.")] = None,
    engines: Annotated[int | None, typer.Option(min=0, max=8, help="How many engines.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=2, help="Kinds of weights: trained alone, or frozen ones as well.")
    ] = None,
    reduce: Annotated[
        bool, typer.Option("--reduce", help="States that differ in the names of tags or engines are one.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Go on after the first finding: one per invariant.")] = False,
    ranks: Annotated[int, typer.Option(min=1, max=4, help="How many ranks run the machine together.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many states; proves nothing then.")] = None,
    spin: Annotated[bool, typer.Option("--spin", help="Ask Spin as well, and compare; needs spin and gcc.")] = False,
    promela: Annotated[bool, typer.Option("--promela", help="Print the model for Spin, and do nothing else.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the first counter-example there, for `diagram`.")] = None,
    as_json: _Json = False,
) -> None:
    """Explore everything that a machine can do, whatever fails, and look for a way to break what it promises.

    Exits with 1 when a counter-example is found, or the machine is declared wrongly, and with 2 when it can not run.
    """
    from lifecycle.checker.command import CheckOptions, command

    names = None if tags is None else tuple(name.strip() for name in tags.split(",") if name.strip())
    size = (names, engines, slots, reduce, every, limit, ranks)
    raise typer.Exit(command(CheckOptions(machine, *size, spin, promela, trace, as_json)))


@app.command()
def doctor(
    measure: Annotated[bool, typer.Option(help="Measure the speed of memory and copies: some seconds.")] = True,
    as_json: _Json = False,
) -> None:
    """What this machine can do for an actor, and what to install or set so that it does it well.

    Exits with 1 on an error: something that would be refused, or would end the process. Warnings and notes exit with 0.
    """
    from lifecycle.doctor.command import command

    raise typer.Exit(command(as_json, measure))
