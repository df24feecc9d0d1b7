"""Spin's verdict on a grounded machine. The only file that runs ``spin`` and a C compiler.

[Note: exact] Spin is run so that it drops nothing: no partial-order reduction, no hash compaction, a search stack that
grows until it is deep enough. Its own simplifications of the model are off, too: with the elimination of dead variables
(``spin`` without ``-o2``), version 6.5.2 leaves reachable states of these models out. An unfinished search is an
error and never a verdict.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import frozen

from lifecycle.checker.ground import Program
from lifecycle.checker.promela import RESTING, names_asked, promela
from lifecycle.errors import LifecycleError

_SPIN = ("-a", "-o1", "-o2", "-o3")  # each of them turns a simplification off
_DEFINES = ("SAFETY", "NOREDUCE", "NOFAIR", "PRINTF", "MEMLIM=8192")
_DEPTHS = (1_000_000, 10_000_000, 50_000_000)


class SpinMissing(LifecycleError):
    """A program that the check by Spin needs is not installed. ``program`` is its name."""

    def __init__(self, program: str, package: str) -> None:
        self.program = program
        super().__init__(
            f"the check by Spin needs the program {program!r}, which is not on the PATH: apt install {package}, "
            f"brew install {package}, or see https://spinroot.com. Without it, `lifecycle check` runs as ever."
        )


class SpinFailed(LifecycleError):
    """Spin came to no verdict."""


@frozen
class Verdict:
    """What Spin found. ``broken`` is an invariant, at which the search stopped, or None: it is complete then.

    ``states`` are all that Spin stored, ``resting`` those between two events; ``depth`` is the longest path in steps.
    """

    states: int
    resting: int
    transitions: int
    depth: int
    broken: str | None
    seconds: float
    version: str


def missing() -> SpinMissing | None:
    """What keeps Spin from being run here, if anything."""
    if shutil.which("spin") is None:
        return SpinMissing("spin", "spin")
    return None if _compiler() else SpinMissing("cc", "gcc")


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def run_spin(program: Program, invariant: str | None = None, timeout: float = 600.0) -> Verdict:
    """Check every reachable state of the program with Spin. ``invariant``: ask this one alone, else all.

    Raises SpinMissing where a program is missing, SpinFailed where Spin comes to no verdict, for instance within
    ``timeout`` seconds, and ValueError for an invariant that can not be asked.
    """
    text = promela(program, invariant)
    if (problem := missing()) is not None:
        raise problem
    with TemporaryDirectory(prefix="lifecycle-spin-") as name:  # readable by its owner alone
        until = time.monotonic() + timeout
        folder = Path(name)
        (folder / "model.pml").write_text(text, encoding="utf-8")
        version = _run(["spin", "-V"], folder, until).strip()
        _run(["spin", *_SPIN, "model.pml"], folder, until)
        speed = "-O1" if invariant is None else "-O0"  # to compile takes longer than to find one violation
        _run([_compiler() or "cc", speed, "-w", *(f"-D{one}" for one in _DEFINES), "-o", "pan", "pan.c"], folder, until)
        began = time.monotonic()
        report = _searched(folder, until)
        return _verdict(report, names_asked(program), time.monotonic() - began, version)


def _searched(folder: Path, until: float) -> str:
    for depth in _DEPTHS:
        # -n: no list of unreached code; -E: a machine may come to rest for good
        report = _run(["./pan", f"-m{depth}", "-n", "-E"], folder, until)
        if "max search depth too small" not in report:
            return report
    raise SpinFailed(f"the search by Spin is deeper than {_DEPTHS[-1]:,} steps: check a smaller instance")


def _run(command: Sequence[str], folder: Path, until: float) -> str:
    """What the command printed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(until - time.monotonic(), 0.001),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SpinFailed(f"{command[0]} was not done in time: give a longer timeout, or a smaller instance") from error
    if done.returncode != 0:
        raise SpinFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def _verdict(report: str, names: Sequence[str], seconds: float, version: str) -> Verdict:
    violated = re.search(r"assertion violated \(+broken!=(\d+)\)", report)
    errors = _figure(r"errors: (\d+)", report)
    if (errors > 0) != (violated is not None) or (violated is None and "Search not completed" in report):
        raise SpinFailed(f"Spin's report is not understood: {report[-2000:]}")
    return Verdict(
        _figure(r"(\d+) states, stored", report),
        report.count(f"{RESTING}\n"),
        _figure(r"(\d+) transitions", report),
        _figure(r"depth reached (\d+)", report),
        names[int(violated[1]) - 1] if violated else None,
        seconds,
        version,
    )


def _figure(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise SpinFailed(f"Spin's report has no {pattern!r}: {report[-2000:]}")
    return int(found[1])


__all__ = ["SpinFailed", "SpinMissing", "Verdict", "missing", "run_spin"]
