"""``lifecycle bench``: one function per measurement. What a command needs is imported inside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lifecycle.bench.checking import Measured
    from lifecycle.bench.result import Result
    from lifecycle.bench.subject import Options

bench = typer.Typer(no_args_is_help=True, help="Measure, each against its peers and what bounds it, in the same run.")

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
_Gib = Annotated[
    float | None,
    typer.Option(min=0.001, help="Size of the weights in GiB; without it 8 on a GPU, else 0.05."),
]
_Rounds = Annotated[int, typer.Option(min=1, help="Rounds of each but the slow ones.")]
_Memory = Annotated[str, typer.Option(help="The actor's memory backend.")]
_Host = Annotated[str, typer.Option(help="The actor's host store.")]
_Verify = Annotated[str, typer.Option(help="always, sample or never.")]
_Pieces = Annotated[
    str,
    typer.Option(help="Memory by tensor, layer or model, or in pieces of so many MiB: see `lifecycle bench pieces`."),
]
_Rest = Annotated[
    float | None,
    typer.Option(min=0, max=60, help="Seconds without work before what is timed; without it 0.25 on a GPU, else 0."),
]
_Picture = Annotated[Path | None, typer.Option(help="Draw it as well: a file .svg or .png.")]
_Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 where something promised was not reached.")]


def _of_whole_moves(measure: Callable[[Options], Result]) -> Callable[[Options], Result]:
    """Make a command of it, by its name and docstring, with the options of all that time moves of the whole weights."""

    def command(
        gib: _Gib = None,
        rounds: _Rounds = 5,
        memory: _Memory = "auto",
        host: _Host = "auto",
        verify: _Verify = "always",
        pieces: _Pieces = "256",
        rest: _Rest = None,
        picture: _Picture = None,
        strict: _Strict = False,
        as_json: _Json = False,
    ) -> None:
        def measured() -> Result:
            from lifecycle.bench.subject import Options

            return measure(Options(_size(gib), rounds, memory, host, verify, pieces, _seconds(rest)))

        _finish(measured, as_json, picture, strict)

    bench.command(measure.__name__, help=measure.__doc__)(command)
    return measure


@_of_whole_moves
def memory(options: Options) -> Result:
    """Sleep and wake, with and without a current host copy, beside the memory saver, .to() and plain copies."""
    from lifecycle.bench.memory import measure

    return measure(options)


@_of_whole_moves
def switch(options: Options) -> Result:
    """From changed weights to other ones, beside the two copies one after the other, and both at once."""
    from lifecycle.bench.switch import measure

    return measure(options)


@_of_whole_moves
def wake(options: Options) -> Result:
    """A wake with a forward behind it block by block, beside the wake and then the forward."""
    from lifecycle.bench.wake import measure

    return measure(options)


@bench.command()
def step(
    gib: _Gib = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each case.")] = 2,
    memory: _Memory = "auto",
    host: _Host = "auto",
    verify: _Verify = "always",
    picture: _Picture = None,
    strict: _Strict = False,
    as_json: _Json = False,
) -> None:
    """Bytes that a whole RL step moves, beside the least that must move, and what other policies move."""
    from lifecycle.bench.step import measure
    from lifecycle.bench.subject import Options

    def measured() -> Result:
        return measure(Options(_size(gib, 1.0), rounds, memory, host, verify, "tensor", rest=0.0), rounds)

    _finish(measured, as_json, picture, strict)


@bench.command()
def pieces(
    gib: _Gib = None,
    rounds: _Rounds = 3,
    rest: _Rest = None,
    picture: _Picture = None,
    strict: _Strict = False,
    as_json: _Json = False,
) -> None:
    """The memory saver's pause, and its resume and a copy, by the size of the pieces and the rest. Needs CUDA."""
    from lifecycle.bench.pieces import measure
    from lifecycle.bench.subject import Options

    _finish(lambda: measure(Options(_size(gib), rounds, rest=_seconds(rest))), as_json, picture, strict)


@bench.command()
def fingerprint(
    gib: _Gib = None,
    rounds: _Rounds = 20,
    picture: _Picture = None,
    strict: _Strict = False,
    as_json: _Json = False,
) -> None:
    """Fingerprints of all weights, beside torch's sums and a copy of the same bytes."""
    from lifecycle.bench.fingerprint import measure
    from lifecycle.bench.shaped import fingerprint_result

    _finish(lambda: fingerprint_result(measure(int(_size(gib) * 2**30), rounds)), as_json, picture, strict)


@bench.command()
def pinning(
    gib: _Gib = None,
    rounds: _Rounds = 3,
    picture: _Picture = None,
    strict: _Strict = False,
    as_json: _Json = False,
) -> None:
    """Fresh page-locked host memory, beside cudaMallocHost. Needs CUDA."""
    from lifecycle.bench.pinning import measure
    from lifecycle.bench.shaped import pinning_result

    _finish(lambda: pinning_result(measure(int(_size(gib) * 2**30), rounds)), as_json, picture, strict)


@bench.command()
def workspaces(
    rounds: _Rounds = 5,
    linears: Annotated[int, typer.Option(min=1, help="Layers, 112 MiB of weights each.")] = 8,
    picture: _Picture = None,
    strict: _Strict = False,
    as_json: _Json = False,
) -> None:
    """Quantised weights dropped before a pause, beside a pause that copies them. Needs TransformerEngine and CUDA."""
    from lifecycle.bench.workspaces import measure

    _finish(lambda: measure(rounds, linears), as_json, picture, strict)


@bench.command()
def overhead(
    rounds: Annotated[int, typer.Option(min=10, help="Round trips of each.")] = 3000,
    picture: _Picture = None,
    as_json: _Json = False,
) -> None:
    """A switch there and back between two tags of one version, beside two triggers of a bare state machine."""
    from lifecycle.bench.overhead import measure

    _check_picture(picture)
    result = measure(rounds)
    if picture is not None:
        from lifecycle.bench.picture import draw
        from lifecycle.bench.shaped import overhead_result

        draw(overhead_result(result), picture)
    if as_json:
        print(json.dumps(result.to_plain(), indent=2))
        return
    for name, spread in (("lifecycle", result.ours_us), ("bare transitions", result.bare_us)):
        print(f"{name:18} median {spread.median:7.1f} µs   p10 {spread.p10:7.1f}   p90 {spread.p90:7.1f}")
    print(f"ratio {result.ratio:.2f} over {result.rounds} interleaved rounds, {result.bytes_moved} bytes moved")


@bench.command()
def check(as_json: _Json = False) -> None:
    """How large the declared machines are when explored, and how long it takes: minutes."""
    from lifecycle.bench.checking import measure

    result = measure(None if as_json else _tell)
    if as_json:
        print(json.dumps(result, indent=2))


@bench.command()
def draw(
    document: Annotated[Path, typer.Argument(help="What --json printed, in a file.", exists=True, dir_okay=False)],
    picture: Annotated[
        Path | None, typer.Option(help="A file .svg or .png; without it the document's name with .svg.")
    ] = None,
) -> None:
    """Draw a result that was measured elsewhere, and print where."""
    from lifecycle.bench.picture import draw as drawn
    from lifecycle.bench.result import from_plain

    picture = picture or document.with_suffix(".svg")
    _check_picture(picture)
    if picture.exists() and picture.samefile(document):
        raise typer.BadParameter(f"--picture {picture}: that is the document itself")
    try:
        drawn(from_plain(json.loads(document.read_text(encoding="utf-8"))), picture)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{document}: {error}") from error
    print(picture)


def _size(gib: float | None, on_gpu: float = 8.0) -> float:
    """GiB. What takes seconds on a GPU takes many minutes on a CPU."""
    import torch

    return gib or (on_gpu if torch.cuda.is_available() else 0.05)


def _seconds(rest: float | None) -> float:
    """Without a device there is nothing that goes on behind a call."""
    import torch

    return rest if rest is not None else 0.25 if torch.cuda.is_available() else 0.0


def _check_picture(picture: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if picture is not None:
        from lifecycle.bench.picture import require

        try:
            require(picture)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def _finish(measure: Callable[[], Result], as_json: bool, picture: Path | None, strict: bool) -> None:
    """Measure and tell. Exits with 0, or with ``strict`` with 1 where a line was not reached."""
    _check_picture(picture)
    try:
        result = measure()
    except (ValueError, OSError) as error:  # a setting that can not be used
        raise typer.BadParameter(str(error.args[0] if isinstance(error, ValueError) else error)) from error
    if as_json:
        print(json.dumps(result.to_plain(), indent=2))
    else:
        from lifecycle.bench.show import show

        show(result)
    if picture is not None:
        from lifecycle.bench.picture import draw

        draw(result, picture)
    raise typer.Exit(1 if strict and not all(line.ok for line in result.accepted) else 0)


def _tell(one: Measured) -> None:
    size = one.size
    told = f"{size.machine}: {len(size.other_tags) + 1} tags, {size.engines} engines, {size.slots} kinds of weights"
    told += (f", {size.ranks} ranks" if size.ranks > 1 else "") + (", reduced" if size.reduced else "")
    print(f"{told}: {one.states:,} states, {one.moves:,} moves, {one.findings} findings in {one.seconds:.1f} s")
