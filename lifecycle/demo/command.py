"""``lifecycle demo``: run it, show it, say by the exit status whether every check passed."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from lifecycle.demo.main import document, run
from lifecycle.demo.options import DemoOptions
from lifecycle.demo.view import live_progress, plain_progress, show

_PAGE = 120  # columns where there is no terminal to ask


def command(options: DemoOptions, as_json: bool) -> int:
    """0 when all checks passed, else 1. With ``as_json`` standard output is one JSON document and nothing else."""
    console = Console()
    live = console.is_terminal and not as_json
    if not live:
        console = Console(width=_PAGE)
    with live_progress(options, console) if live else plain_progress(options, sys.stderr) as progress:
        result = run(options, progress)
    if as_json:
        print(json.dumps(document(result), indent=2))
    else:
        show(result, console)
    return 0 if result.passed else 1
