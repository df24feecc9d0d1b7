"""All measurements, one after the other, each in a process of its own: ``python -m lifecycle.bench.all --output DIR``.

One that fails, or takes too long, does not stop the rest. Writes ``NAME.json``, ``NAME.txt`` and, where matplotlib is
installed, ``NAME.svg`` (``lifecycle bench draw`` makes it later from the JSON elsewhere).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from lifecycle.bench.result import Result, from_plain


@frozen
class Bench:
    """``size``: what its weights are of those asked for; None where it takes no size. ``seconds``: its time limit."""

    name: str
    size: float | None = 1.0
    seconds: float = 180.0


#: What moves six times as many bytes for the optimizer needs smaller weights.
BENCHES = (
    Bench("pieces"),
    Bench("memory"),
    Bench("switch"),
    Bench("wake"),
    Bench("step", size=1 / 8),
    Bench("fingerprint"),
    Bench("pinning"),
    Bench("workspaces", size=None),
    Bench("overhead", size=None),
)
NAMES = tuple(bench.name for bench in BENCHES)


@frozen
class Outcome:
    """How one ended: "measured", or why not."""

    name: str
    ended: str
    seconds: float

    @property
    def measured(self) -> bool:
        return self.ended == "measured"


def run_all(output: Path, gib: float = 8.0, only: Sequence[str] = NAMES) -> list[Outcome]:
    """Run those named, in the order of ``BENCHES``; tell each one's table and how it ended."""
    output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for bench in BENCHES:
        if bench.name in only:
            outcome = _run(bench, output, gib)
            print(f"== {outcome.name}: {outcome.ended}, {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
    return outcomes


def _run(bench: Bench, output: Path, gib: float) -> Outcome:
    began = time.monotonic()
    command = [sys.executable, "-m", "lifecycle", "bench", bench.name, "--json"]
    if bench.size is not None:
        command += ["--gib", str(gib * bench.size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=bench.seconds)
    except subprocess.TimeoutExpired as late:
        _write(output / f"{bench.name}.err", _text(late.stderr))
        return Outcome(bench.name, f"stopped after {bench.seconds:.0f} s", time.monotonic() - began)
    ended = _keep(bench, output, done)
    return Outcome(bench.name, ended, time.monotonic() - began)


def _keep(bench: Bench, output: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Write the files and print the table of what was measured, also where the process ended badly afterwards."""
    if done.stderr:
        _write(output / f"{bench.name}.err", done.stderr)
    document = _document(done.stdout)
    try:
        plain = json.loads(document)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return f"failed with exit status {done.returncode}: {last[0]}"
    _write(output / f"{bench.name}.json", document)
    if "groups" in plain:
        _tell(bench, output, from_plain(plain))
    return "measured" if done.returncode == 0 else f"measured, then exit status {done.returncode}"


def _tell(bench: Bench, output: Path, result: Result) -> None:
    from rich.console import Console

    from lifecycle.bench.show import WIDTH, show

    with (output / f"{bench.name}.txt").open("w", encoding="utf-8") as file:
        show(result, Console(file=file, width=WIDTH))
    print((output / f"{bench.name}.txt").read_text(encoding="utf-8"), flush=True)
    if find_spec("matplotlib") is not None:
        from lifecycle.bench.picture import draw

        draw(result, output / f"{bench.name}.svg")


def _document(output: str) -> str:
    """The JSON document, without what libraries may have printed around it."""
    return output[output.find("{\n") : output.rfind("\n}") + 3]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def main(
    output: Annotated[Path, typer.Option(help="Folder for JSON, tables and pictures.")],
    gib: Annotated[float, typer.Option(min=0.001, help="Size of the weights, in GiB.")] = 8.0,
    only: Annotated[str, typer.Option(help="Names with commas between.")] = ",".join(NAMES),
) -> None:
    """Exits with 1 where one could not be measured."""
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"--only {', '.join(unknown)}: known are {', '.join(NAMES)}")
    raise typer.Exit(0 if all(outcome.measured for outcome in run_all(output, gib, wanted)) else 1)


if __name__ == "__main__":
    typer.run(main)
