"""One call from a machine to a picture in any format."""

from __future__ import annotations

from collections.abc import Iterable

from lifecycle.checker.trace import Trace
from lifecycle.render import joint_texts
from lifecycle.render.dot import Layout, to_dot
from lifecycle.render.extract import extract
from lifecycle.render.highlight import highlight
from lifecycle.render.images import render
from lifecycle.render.joint import JointDiagram
from lifecycle.render.markdown import to_markdown
from lifecycle.render.mermaid import to_mermaid
from lifecycle.render.model import Diagram
from lifecycle.render.options import Detail, Format
from states.spec import MachineSpec


def diagram_of(
    spec: MachineSpec,
    detail: Detail = Detail.EFFECTS,
    tags: Iterable[str] = (),
    current: str | None = None,
    trace: Trace | None = None,
) -> Diagram:
    """What a picture of the machine shows. Raises ValueError for a state or a trace that is not the machine's."""
    diagram = extract(spec, detail, tags, current)
    return diagram if trace is None else highlight(diagram, spec, trace)


def draw_joint(diagram: JointDiagram, kind: Format) -> bytes:
    """The same for machines that run together."""
    if kind is Format.MERMAID:
        return joint_texts.to_mermaid(diagram).encode()
    if kind is Format.MARKDOWN:
        return joint_texts.to_markdown(diagram).encode()
    dot = joint_texts.to_dot(diagram)
    return dot.encode() if kind is Format.DOT else render(dot, str(kind))


def draw(diagram: Diagram, kind: Format, layout: Layout | None = None) -> bytes:
    """The picture as a file's bytes. Images raise MissingExtra or MissingProgram where they can not be drawn."""
    if kind is Format.MERMAID:
        return to_mermaid(diagram).encode()
    if kind is Format.MARKDOWN:
        return to_markdown(diagram).encode()
    dot = to_dot(diagram, layout)
    return dot.encode() if kind is Format.DOT else render(dot, str(kind))
