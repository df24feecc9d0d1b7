"""``lifecycle diagram``: a machine as a picture or as text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lifecycle.attach import checked_tags
from lifecycle.checker.trace import Trace, trace_from_plain
from lifecycle.errors import LifecycleError
from lifecycle.load import find_machine
from lifecycle.render.declared import JOINT, TAGS, layout_of
from lifecycle.render.draw import diagram_of, draw, draw_joint
from lifecycle.render.joint import extract_joint
from lifecycle.render.options import Detail, Format
from states.joint import COLOCATED

_BINARY = (Format.PNG, Format.PDF)


def command(machine: str, kind: str, detail: str, highlight: Path | None, tags: str | None, output: Path | None) -> int:
    """Writes the picture to ``output``, or to the standard output. Returns 0, or 2 after saying what was wrong."""
    try:
        written = _draw(machine, kind, detail, highlight, tags, output)
        if output is None:
            sys.stdout.write(written.decode())
        else:
            output.write_bytes(written)
    except (ValueError, LifecycleError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _draw(machine: str, kind: str, detail: str, highlight: Path | None, tags: str | None, output: Path | None) -> bytes:
    wanted, shown = Format(kind), Detail(detail)
    machine = "joint" if machine == COLOCATED.name else machine
    if wanted in _BINARY and output is None:
        raise ValueError(f"{wanted} is no text: write it to a file with --output")
    if machine in JOINT:
        if highlight is not None:
            raise ValueError(f"{machine} is several machines: draw the trace in the picture of one")
        return draw_joint(extract_joint(JOINT[machine]), wanted)
    spec = find_machine(machine)
    trace = None if highlight is None else _trace(highlight)
    if tags is not None:
        names = checked_tags(name.strip() for name in tags.split(",") if name.strip())
    else:
        names = trace.tags if trace else TAGS.get(machine, ("ref",))
    diagram = diagram_of(spec, shown, names, trace=trace)
    return draw(diagram, wanted, layout_of(spec.name, shown))


def _trace(path: Path) -> Trace:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{path} holds no trace")
    if "findings" in plain:
        raise ValueError(f"{path} is a whole report: give one trace, as `lifecycle check --trace FILE` writes it")
    try:
        return trace_from_plain(plain)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
