"""From Graphviz text to SVG, PNG and PDF. The only file that needs the package ``graphviz`` and the program ``dot``."""

from __future__ import annotations

import re
from types import ModuleType

from lifecycle.errors import LifecycleError, MissingExtra
from lifecycle.render.palette import dark_style

FORMATS = ("svg", "png", "pdf")


class MissingProgram(LifecycleError):
    """The program that draws is not installed. ``program`` is its name."""

    def __init__(self, program: str) -> None:
        self.program = program
        super().__init__(
            f"images need Graphviz's program {program!r}, which is not on the PATH: apt install graphviz, "
            "brew install graphviz, or see https://graphviz.org/download. The formats dot, mermaid and markdown "
            "need nothing."
        )


def render(dot: str, kind: str) -> bytes:
    """The picture as a file's bytes; SVG follows the reader's light or dark screen.

    Raises MissingExtra without the package ``graphviz``, and MissingProgram without ``dot``.
    """
    graphviz = _package()
    try:
        drawn: bytes = graphviz.Source(dot).pipe(format=kind)
    except graphviz.ExecutableNotFound as error:
        raise MissingProgram("dot") from error
    return _for_both_screens(drawn.decode()).encode() if kind == "svg" else drawn


def _package() -> ModuleType:
    try:
        import graphviz
    except ImportError as error:
        raise MissingExtra("drawing images", "graphviz", "diagrams") from error
    found: ModuleType = graphviz
    return found


def _for_both_screens(svg: str) -> str:
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)  # the version of Graphviz, and names once more
    return re.sub(r"(<svg\b[^>]*>)", lambda head: f"{head[1]}\n<style>{dark_style()}</style>", svg, count=1)
