"""A picture as text for Graphviz."""

from __future__ import annotations

import json
from collections.abc import Iterable

from attrs import frozen

from lifecycle.render import labels, palette
from lifecycle.render.labels import cell, font, line, table, words
from lifecycle.render.legend import legend
from lifecycle.render.model import Diagram, Edge, Entry, Kind, Mark, Node
from lifecycle.render.options import Detail

# Faces of nearly one width: a picture laid out with one of them is still in place with another.
FONT = "Helvetica,Arial,Liberation Sans,DejaVu Sans Condensed,sans-serif"
MANY_INSIDE = 5  # more rows than these inside a node are set in two columns, more than twice as many in three


@frozen
class Layout:
    """What Graphviz may be told about the places of things: distances in inches, and what to keep together."""

    nodesep: float = 0.25
    ranksep: float = 0.3
    ends_last: bool = True  # final states at the bottom
    together: bool = True  # a stub beside its state
    order: tuple[str, ...] = ()  # states from the top down, where that is not the order of their declaration


def to_dot(diagram: Diagram, layout: Layout | None = None) -> str:
    """The same text for the same picture, byte for byte."""
    layout = layout or Layout()
    lines = [
        "digraph machine {",
        f"  graph [{attributes(bgcolor=palette.PAPER, fontname=FONT, fontsize=labels.SIZE, pad='0.04')}",
        f"         ranksep={layout.ranksep:g} nodesep={layout.nodesep:g} rankdir=TB newrank=true",
        '         labelloc=b charset="utf-8"',
        f"         label=<{legend(diagram)}>]",
        f"  node [{attributes(fontname=FONT, fontsize=labels.SIZE, fontcolor=palette.INK)} shape=plain]",
        f"  edge [{attributes(fontname=FONT, fontsize=labels.SIZE, arrowsize='0.7')}]",
        "  subgraph cluster_machine {",
        f"    label=<{_title(diagram)}> labelloc=t pencolor=none margin=4",
        f'    start [shape=circle style=filled label="" width=0.12 {attributes(color=palette.INK)}'
        f" {attributes(fillcolor=palette.INK)}]",
        *(f"    {text}" for node in diagram.nodes for text in _node(diagram, node)),
        f"    {{rank=same start -> {diagram.ident(diagram.initial)} [{attributes(color=palette.INK)}]}}",
        *(f"    {text}" for text in (_ends_last(diagram) if layout.ends_last else ())),
        *(f"    {text}" for place, edge in enumerate(diagram.edges) for text in _edge(diagram, edge, place, layout)),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _ends_last(diagram: Diagram) -> list[str]:
    """Keeps final states at the bottom, where there is room."""
    ends = [node.name for node in diagram.nodes if node.final]
    others = [n.name for n in diagram.nodes if not n.final and not n.fault and n.name != diagram.initial]
    pairs = [(diagram.ident(other), diagram.ident(end)) for end in ends for other in others]
    return [f"{other} -> {end} [style=invis minlen=0 weight=0]" for other, end in pairs]


def attributes(**values: object) -> str:
    return " ".join(f"{name}={json.dumps(str(value))}" for name, value in values.items())


def _title(diagram: Diagram) -> str:
    title = font(f"<B>{words(diagram.title)}</B>", palette.INK, 13)
    if not diagram.subtitle:
        return title
    return f"{title}<BR/>{font(f'<B>{words(diagram.subtitle)}</B>', palette.VERMILLION, 10)}"


def _rows(entries: Iterable[Entry]) -> str:
    return " ".join(str(entry.row) for entry in entries)


def _node(diagram: Diagram, node: Node) -> list[str]:
    comment = [f"// rows {_rows(node.inside)}"] if node.inside else []
    kinds = ["state"] + [name for name in ("final", "fault") if getattr(node, name)] + ["current"] * bool(node.current)
    return [*comment, f'{diagram.ident(node.name)} [class="{" ".join(kinds)}" label=<{_box(diagram, node)}>]']


def _box(diagram: Diagram, node: Node) -> str:
    faded = node.mark is Mark.FADED
    ink = palette.FADED if faded else palette.INK
    rows = [line(cell(_heading(node, ink), "CENTER"))]
    pills = [(node.tags, "one per tag:"), (node.origins, "remembers:")]
    rows += [line(cell(_pills(names, said, ink), "CENTER")) for names, said in pills if names is not None]
    if node.holds or node.lacks:
        rows += ["<HR/>", line(cell(_contract(node)))]
    if node.inside:
        rows += ["<HR/>", line(cell(_inside(node, diagram.detail is Detail.EFFECTS), "CENTER"))]
    border = labels.STEP_COLOUR.get(node.mark, palette.VERMILLION if node.fault else ink)
    if faded:
        border = palette.LINE
    style = "ROUNDED,DASHED" if node.fault else "ROUNDED"
    plain = node.mark is Mark.PLAIN
    fill = palette.MARKED if node.current else palette.FAULTY if node.fault and plain else palette.BOX
    width = 2 if node.mark in labels.STEP_COLOUR else 1
    box = table(rows, width, 2, 0, f' COLOR="{border}" BGCOLOR="{fill}" STYLE="{style}"')
    if node.current or node.final:  # the double border of a state that something is in, or that nothing leaves
        double = f' COLOR="{border}" STYLE="ROUNDED"'
        box = table([line(cell(box, "CENTER"))], 2 if node.current else 1, 2, 0, double)
    return box


def _heading(node: Node, ink: str) -> str:
    name = f"{words(node.name)}(tag)" if node.tags is not None else words(node.name)
    if node.current:
        return font(f"<B>● {words(node.current)}</B>", ink, 10)
    return font(f"<B>{name}</B>", ink, 10)


def _pills(names: Iterable[str], said: str, ink: str) -> str:
    pill = f' BORDER="1" STYLE="ROUNDED" COLOR="{palette.LINE}" CELLPADDING="2"'
    shown = [cell(font(words(name), ink), "CENTER", pill) for name in names] or [cell(font("none", ink))]
    return table([line(cell(font(said, palette.MUTED)), *shown)], 0, 1, 3)


def _contract(node: Node) -> str:
    parts = []
    for sign, facts, colour in (("✓", node.holds, palette.GREEN), ("✗", node.lacks, palette.VERMILLION)):
        if facts:
            text = labels.wrapped([(fact, words(fact)) for fact in facts], 56, ", ", "&#160;" * 4)
            parts.append(line(cell(font(f"<B>{sign}</B>", colour) + font(f" {text}", palette.INK))))
    return table(parts)


def _inside(node: Node, strips: bool) -> str:
    shown = [cell(labels.entry(one, strips)) for one in node.inside]
    if len(shown) <= MANY_INSIDE:
        return table(line(one) for one in shown)
    height = -(-len(shown) // (2 if len(shown) <= 2 * MANY_INSIDE else 3))
    parts = [shown[at : at + height] for at in range(0, len(shown), height)]
    columns = [table(line(one) for one in part) for part in parts]
    return table([line(*(cell(column, "LEFT", ' VALIGN="TOP"') for column in columns))], 0, 0, 6)


def _edge(diagram: Diagram, edge: Edge, place: int, layout: Layout) -> list[str]:
    colour, width, style = _pen(edge)
    pen = attributes(color=colour, penwidth=width, style=style) + " arrowhead=vee" * (edge.kind is Kind.FAULT)
    kinds = f"edge {edge.kind} {edge.mark}" + " broken" * edge.broken
    source, target = f"stub_{place}" if edge.many else diagram.ident(edge.source), diagram.ident(edge.target)
    ends = f"{source} -> {target}"
    order = tuple(dict.fromkeys((*layout.order, *(node.name for node in diagram.nodes))))
    if edge.broken and edge.source == edge.target:
        ends = f"{source}:w -> {source}:w"  # on the side where no other loop is
    elif not edge.many and order.index(edge.source) > order.index(edge.target):
        ends, pen = f"{target} -> {source}", f"{pen} dir=back"  # an arrow upwards
    comment = [f"// rows {_rows(edge.entries)}"] if edge.entries else []
    drawn = [*comment, f'{ends} [class="{kinds}" {pen} label=<{_label(diagram, edge)}>]']
    if not edge.many:
        return drawn
    stub = f"{source} [label=<{_stub(edge)}>]"
    if not layout.together:
        return [stub, *drawn]
    return [f'subgraph cluster_{place} {{pencolor=none label="" margin=2', f"  {stub}", f"  {target}", "}", *drawn]


def _label(diagram: Diagram, edge: Edge) -> str:
    strips = diagram.detail is Detail.EFFECTS
    said = _said(edge)
    from_each = bool(edge.many) and len(said) > 1
    shown = [labels.entry(one, strips, from_each, under=not edge.many) for one in said]
    for attempt in edge.attempts:
        text = f"<B>{labels.steps((attempt.step,), edge.mark)} {words(attempt.text)}</B>"
        shown.append(font(text, labels.STEP_COLOUR.get(edge.mark, palette.INK)))
    lines = table((line(cell(text)) for text in shown), 0, 0.5, 0)
    return table([line(cell(lines, "LEFT", ' CELLPADDING="3"'))])


def _stub(edge: Edge) -> str:
    names = labels.wrapped([(name, words(name)) for name in edge.many], 22, ", ")
    return table([line(cell(font(names, palette.MUTED), "CENTER"))], 1, 3, 0, f' COLOR="{palette.LINE}" STYLE="DOTTED"')


def _said(edge: Edge) -> tuple[Entry, ...]:
    """What is written on the edge: what rows from many states all say is written once."""
    alike = {(one.text, one.number, one.steps) for one in edge.entries}
    return edge.entries[:1] if edge.many and len(alike) == 1 else edge.entries


def _pen(edge: Edge) -> tuple[str, str, str]:
    style = "dashed" if edge.broken or edge.kind is Kind.FAULT else "solid"
    if edge.mark in labels.STEP_COLOUR:
        return labels.STEP_COLOUR[edge.mark], "2.4", style
    if edge.mark is Mark.FADED:
        return palette.FAINT, "0.7", style
    if edge.kind is Kind.NORMAL:
        return palette.BLUE, "1.4", style
    return palette.LINE, "0.6", style
