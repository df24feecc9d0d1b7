"""What a notebook shows for a machine or a live controller."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from lifecycle.errors import MissingExtra
from lifecycle.render.declared import layout_of
from lifecycle.render.draw import draw
from lifecycle.render.extract import extract
from lifecycle.render.images import MissingProgram
from lifecycle.render.mermaid import to_mermaid
from lifecycle.render.options import Detail, Format
from states.spec import MachineSpec


def mimebundle(
    spec: MachineSpec, tags: Iterable[str] = (), current: str | None = None, detail: Detail = Detail.STATES
) -> dict[str, str]:
    """The picture as SVG where it can be drawn, and always as Mermaid. ``current``: the state, as users read it."""
    diagram = extract(spec, detail, tags, current)
    bundle = {"text/markdown": f"```mermaid\n{to_mermaid(diagram)}```\n"}
    with suppress(MissingExtra, MissingProgram):  # a notebook on a machine without Graphviz shows the text
        bundle["image/svg+xml"] = draw(diagram, Format.SVG, layout_of(spec.name, detail)).decode()
    return bundle


def svg(spec: MachineSpec, tags: Iterable[str] = (), current: str | None = None) -> str | None:
    """The picture as SVG, or None where it can not be drawn: what ``_repr_svg_`` returns."""
    return mimebundle(spec, tags, current).get("image/svg+xml")
