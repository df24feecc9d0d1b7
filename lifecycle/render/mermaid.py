"""A picture as text for Mermaid, which GitHub and many editors draw by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from lifecycle.render import palette
from lifecycle.render.labels import steps, strip
from lifecycle.render.model import Diagram, Edge, Entry, Kind, Mark, Node
from lifecycle.render.options import Detail

_CLASSES = (
    f"classDef state fill:{palette.BOX},stroke:{palette.INK},color:{palette.INK}",
    f"classDef fault fill:{palette.FAULTY},stroke:{palette.VERMILLION},color:{palette.INK},stroke-dasharray:5 3",
    f"classDef final fill:{palette.ENDED},stroke:{palette.INK},color:{palette.INK},stroke-width:3px",
    f"classDef current fill:{palette.MARKED},stroke:{palette.INK},color:{palette.INK},stroke-width:4px",
    f"classDef stub fill:none,stroke:{palette.LINE},stroke-dasharray:2 3",
    f"classDef faded fill:none,stroke:{palette.LINE},color:{palette.FADED}",
    f"classDef path fill:{palette.BOX},stroke:{palette.BLUE},color:{palette.INK},stroke-width:3px",
    f"classDef last fill:{palette.BOX},stroke:{palette.VERMILLION},color:{palette.INK},stroke-width:3px",
)
_STROKES = {
    Mark.PATH: f"stroke:{palette.BLUE},stroke-width:3px",
    Mark.LAST: f"stroke:{palette.VERMILLION},stroke-width:4px",
    Mark.FADED: f"stroke:{palette.LINE},stroke-width:1px",
}


def to_mermaid(diagram: Diagram) -> str:
    """The same text for the same picture, byte for byte."""
    title = diagram.title + (f": {diagram.subtitle}" if diagram.subtitle else "")
    lines = ["---", f"title: {yaml(title)}", "---", "flowchart TB", '  start((" ")):::final']
    used = ["state"]
    for node in diagram.nodes:
        lines += [f"  {text}" for text in _node(diagram, node)]
        used.append(_class(node))
    lines.append(f"  start --> {diagram.ident(diagram.initial)}")
    styles = []
    for place, edge in enumerate(diagram.edges):
        lines += [f"  {text}" for text in _edge(diagram, edge, place)]
        if edge.mark in _STROKES:
            styles.append(f"  linkStyle {place + 1} {_STROKES[edge.mark]}")
    return "\n".join([*lines, *styles, *(f"  {text}" for text in _CLASSES)]) + "\n"


def escaped(text: str) -> str:
    """The text inside a quoted label. Everything that Mermaid, Markdown or HTML could read is written as a number."""
    return "".join(c if c.isalnum() or c in " _(),.:·○◆‖†●✗✓▶–→-" else f"#{ord(c)};" for c in text)


def yaml(text: str) -> str:
    """The text as a value of the head."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _class(node: Node) -> str:
    if node.current:
        return "current"
    if node.mark is not Mark.PLAIN:
        return str(node.mark)
    return "fault" if node.fault else "final" if node.final else "state"


def _rows(entries: Iterable[Entry]) -> list[str]:
    rows = " ".join(str(entry.row) for entry in entries)
    return [f"%% rows {rows}"] if rows else []


def _node(diagram: Diagram, node: Node) -> list[str]:
    name = f"{node.name}(tag)" if node.tags is not None else node.name
    lines = [f"<b>{escaped(f'● {node.current}' if node.current else name)}</b>"]
    if node.tags is not None:
        lines.append(escaped("one per tag: " + (", ".join(node.tags) or "none")))
    if node.origins is not None:
        lines.append(escaped("remembers: " + ", ".join(node.origins)))
    lines += [escaped(f"✓ {fact}") for fact in node.holds] + [escaped(f"✗ {fact}") for fact in node.lacks]
    lines += [_entry(diagram, entry) for entry in node.inside]
    label = "<br/>".join(lines)
    return [*_rows(node.inside), f'{diagram.ident(node.name)}("{label}"):::{_class(node)}']


def _entry(diagram: Diagram, entry: Entry, source: bool = False) -> str:
    text = escaped(entry.text) + (f" from {escaped(entry.source)}" if source else "")
    if entry.kind is Kind.NOOP:
        text = f"<i>{text}</i>"
    if entry.steps:
        text = f"<b>{escaped(steps(entry.steps, entry.mark))}</b> {text}"
    shape = strip(entry.effects) if diagram.detail is Detail.EFFECTS else ""
    return f"{text} {shape}".rstrip()


def _edge(diagram: Diagram, edge: Edge, place: int) -> list[str]:
    texts = [_entry(diagram, entry, bool(edge.many)) for entry in edge.entries]
    texts += [escaped(f"{steps((one.step,), edge.mark)} {one.text}") for one in edge.attempts]
    thin = edge.broken or edge.kind in (Kind.FAULT, Kind.CLOSING)
    arrow = "-.->" if thin else "-->"
    source = f"stub_{place}" if edge.many else diagram.ident(edge.source)
    stub = [f'{source}["{escaped(", ".join(edge.many))}"]:::stub'] if edge.many else []
    label = "<br/>".join(texts)
    return [*stub, *_rows(edge.entries), f'{source} {arrow}|"{label}"| {diagram.ident(edge.target)}']
