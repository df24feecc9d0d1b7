"""``python -m lifecycle``, and the command ``lifecycle``."""

from __future__ import annotations

import sys
from typing import NoReturn

from lifecycle.errors import LifecycleError, MissingExtra

_PACKAGES = {"typer": "cli", "rich": "cli", "torch": "torch", "numpy": "torch", "psutil": "torch"}  # and their extras


def main() -> None:
    """Run the command line. Where its packages are missing, say what to install, and exit with 2."""
    try:
        from lifecycle.cli import app

        app(prog_name="lifecycle")
    except ModuleNotFoundError as missing:
        if missing.name not in _PACKAGES:
            raise
        extra = _PACKAGES[missing.name]
        _fail(MissingExtra("the command line" if extra == "cli" else "this command", missing.name, extra))
    except LifecycleError as error:
        _fail(error)


def _fail(error: LifecycleError) -> NoReturn:
    print(error, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
