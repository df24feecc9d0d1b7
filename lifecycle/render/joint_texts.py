"""The picture of machines that run together as text for Graphviz, Mermaid, and as Markdown."""

from __future__ import annotations

from itertools import pairwise

from lifecycle.render import labels, mermaid, palette
from lifecycle.render.dot import FONT, attributes
from lifecycle.render.joint import Between, JointDiagram
from lifecycle.render.labels import cell, font, line, table, words
from lifecycle.render.markdown import escaped
from lifecycle.render.markdown import table as markdown_table
from lifecycle.render.model import Diagram, Edge, Node

# From the top down, where that is not the order of the declaration.
_ORDERS = {
    "rollout": ("AWAKE", "PAUSED", "ASLEEP", "UPDATING", "STOPPED"),
}


def to_dot(diagram: JointDiagram) -> str:
    """The same text for the same picture, byte for byte."""
    lines = [
        "digraph machines {",
        f"  graph [{attributes(bgcolor=palette.PAPER, fontname=FONT, fontsize=labels.SIZE, pad='0.08')}",
        '         rankdir=TB ranksep=0.3 nodesep=0.22 labelloc=t compound=true charset="utf-8"',
        f"         label=<{_title(diagram)}>]",
        f"  node [{attributes(fontname=FONT, fontsize=labels.SIZE, fontcolor=palette.INK)} shape=plain]",
        f"  edge [{attributes(fontname=FONT, fontsize=labels.SIZE, arrowsize='0.7')}]",
    ]
    first, *others = [_member(diagram, number, member) for number, member in enumerate(diagram.members)]
    parts = [first, _between(diagram), *others, _dashed(diagram)]
    return "\n".join([*lines, *(f"  {text}" for part in parts for text in part), "}"]) + "\n"


def _member(diagram: JointDiagram, number: int, member: Diagram) -> list[str]:
    title = font(f"<B>{words(member.title)}</B>", palette.INK, 11)
    first = diagram.ident(member.name, member.initial)
    return [
        f"subgraph cluster_{number} {{",
        f'  label=<{title}> labelloc=t style="rounded,filled" margin=16 {attributes(color=palette.BOX)}',
        f'  start_{number} [shape=circle style=filled label="" width=0.12'
        f" {attributes(color=palette.INK, fillcolor=palette.INK)}]",
        *(f"  {_node(diagram, member, node)}" for node in member.nodes),
        f"  {{rank=same start_{number} -> {first} [{attributes(color=palette.INK)}]}}",
        *(f"  {_edge(diagram, member, edge)}" for edge in member.edges),
        "}",
    ]


def _node(diagram: JointDiagram, member: Diagram, node: Node) -> str:
    name = f"{node.name}(tag)" if node.tags is not None else node.name
    rows = [line(cell(font(f"<B>{words(name)}</B>", palette.INK, 10), "CENTER"))]
    said = diagram.said(member, node.inside)
    if said:
        rows += ["<HR/>", *(line(cell(_said(text))) for text in said)]
    border = palette.VERMILLION if node.fault else palette.INK
    style = "ROUNDED,DASHED" if node.fault else "ROUNDED"
    box = table(rows, 1, 3, 0, f' COLOR="{border}" BGCOLOR="{palette.PAPER}" STYLE="{style}"')
    if node.final:
        box = table([line(cell(box, "CENTER"))], 1, 2, 0, f' COLOR="{border}" STYLE="ROUNDED"')
    return f"{diagram.ident(member.name, node.name)} [label=<{box}>]"


def _said(text: str) -> str:
    return font(words(text), palette.VERMILLION if text.startswith("⊘") else palette.BLUE)


def _edge(diagram: JointDiagram, member: Diagram, edge: Edge) -> str:
    said = diagram.said(member, edge.entries)
    ruled = any(text.startswith("⊘") for text in said)
    colour = palette.VERMILLION if ruled else palette.BLUE if said else palette.LINE
    padded = table([line(cell(table(line(cell(_said(text))) for text in said), "LEFT", ' CELLPADDING="3"'))])
    label = f" label=<{padded}>" if said else ""
    pen = attributes(color=colour, penwidth="1.4" if said else "0.6")
    target = diagram.ident(member.name, edge.target)
    if edge.many:
        return _fan(diagram, member, edge, f"{pen}{label}")
    source = diagram.ident(member.name, edge.source)
    order = list(dict.fromkeys((*_ORDERS.get(member.name, ()), *(node.name for node in member.nodes))))
    if order.index(edge.source) > order.index(edge.target):
        return f"{target} -> {source} [{pen}{label} dir=back]"
    return f"{source} -> {target} [{pen}{label}]"


def _fan(diagram: JointDiagram, member: Diagram, edge: Edge, pen: str) -> str:
    """One arrow from a stub; a fault or an end looks the same from every state."""
    target = diagram.ident(member.name, edge.target)
    names = labels.wrapped([(name, words(name)) for name in edge.many], 22, ", ")
    cells = table(
        [line(cell(font(names, palette.MUTED), "CENTER"))], 1, 3, 0, f' COLOR="{palette.LINE}" STYLE="DOTTED"'
    )
    return f"stub_{target} [label=<{cells}>]\n    stub_{target} -> {target} [{pen}]"


def _between(diagram: JointDiagram) -> list[str]:
    """The column between the machines: the rules, and what the first asks of the others."""
    boxes = {f"rule_{rule.number}": _rule(rule) for rule in diagram.rules}
    if diagram.asked:
        boxes["asks"] = _asks(diagram)
    names = list(boxes)
    return [
        "subgraph cluster_between {",
        '  label="" pencolor=none margin=4',
        *(f"  {name} [label=<{box}>]" for name, box in boxes.items()),
        *(f"  {above} -> {below} [style=invis]" for above, below in pairwise(names)),
        "}",
    ]


def _rule(rule: Between) -> str:
    sentence = f"{rule.machine} is refused what is marked {rule.sign} while {rule.other} has {' or '.join(rule.facts)}"
    text = labels.wrapped([(word, words(word)) for word in sentence.split()], 30, " ")
    rows = [
        line(cell(font(f"<B>{rule.sign} {words(rule.name)}</B>", palette.VERMILLION), "CENTER")),
        line(cell(font(text, palette.INK), "CENTER")),
    ]
    return table(rows, 1, 3, 0, f' COLOR="{palette.VERMILLION}" BGCOLOR="{palette.PAPER}" STYLE="DASHED"')


def _dashed(diagram: JointDiagram) -> list[str]:
    """From each rule to the machine that it looks at, and to the one it refuses something."""
    pen = f"{attributes(color=palette.VERMILLION, penwidth='1.2')} style=dashed constraint=false"
    numbers = {member.name: number for number, member in enumerate(diagram.members)}
    first = {member.name: diagram.ident(member.name, member.initial) for member in diagram.members}
    lines = []
    for rule in diagram.rules:
        name = f"rule_{rule.number}"
        held = next(iter(rule.holding), None)
        looks = first[rule.other] if held is None else diagram.ident(rule.other, held)
        blocked = next(iter(rule.blocked), None)
        refuses = first[rule.machine] if blocked is None else diagram.ident(rule.machine, blocked)
        lines.append(f"{name} -> {looks} [{pen} arrowhead=dot lhead=cluster_{numbers[rule.other]}]")
        lines.append(f"{name} -> {refuses} [{pen} arrowhead=tee lhead=cluster_{numbers[rule.machine]}]")
    return lines


def _asks(diagram: JointDiagram) -> str:
    leader = words(diagram.members[0].name)
    heads = (f"effect of {leader}", "◁ asks of each other")
    rows = [line(*(cell(font(f"<B>{text}</B>", palette.INK)) for text in heads)), "<HR/>"]
    for place, one in enumerate(diagram.asked):
        shade = f' BGCOLOR="{palette.BOX}"' if place % 2 == 0 else ""
        texts = (words(one.effect), "<BR/>".join(words(event) for event in one.events))
        rows.append(line(*(cell(font(text, palette.INK), "LEFT", shade) for text in texts)))
    return table(rows, 1, 1.5, 0, f' COLOR="{palette.LINE}"')


def _title(diagram: JointDiagram) -> str:
    signs = ("⊘ refused by a rule", "◁ asked for by an effect of the other", "thin: of no concern to the other")
    told = "&#160;&#160;&#160;&#160;".join(words(sign) for sign in signs)
    return f"{font(f'<B>{words(diagram.title)}</B>', palette.INK, 13)}<BR/>{font(told, palette.MUTED)}"


def to_mermaid(diagram: JointDiagram) -> str:
    """The same for Mermaid."""
    quoted = mermaid.escaped
    lines = ["---", f"title: {mermaid.yaml(diagram.title)}", "---", "flowchart TB"]
    for number, member in enumerate(diagram.members):
        lines.append(f'  subgraph machine_{number}["{quoted(member.title)}"]')
        for node in member.nodes:
            texts = [f"<b>{quoted(node.name)}</b>", *map(quoted, diagram.said(member, node.inside))]
            lines.append(f'    {diagram.ident(member.name, node.name)}("{"<br/>".join(texts)}")')
        for edge in member.edges:
            said = "<br/>".join(map(quoted, diagram.said(member, edge.entries)))
            label = f'|"{said}"|' if said else ""
            target = diagram.ident(member.name, edge.target)
            for source in edge.many or (edge.source,):
                lines.append(f"    {diagram.ident(member.name, source)} -->{label} {target}")
        lines.append("  end")
    for rule in diagram.rules:
        facts = " or ".join(rule.facts)
        lines.append(f'  rule_{rule.number}["{quoted(f"{rule.sign} {rule.name}: {rule.reason} ({facts})")}"]:::rule')
        lines += [f"  {diagram.ident(rule.other, state)} -.- rule_{rule.number}" for state in rule.holding]
        lines += [f"  rule_{rule.number} -.-x {diagram.ident(rule.machine, state)}" for state in rule.blocked]
    lines.append(f"  classDef rule fill:none,stroke:{palette.VERMILLION},stroke-dasharray:5 3")
    return "\n".join(lines) + "\n"


def to_markdown(diagram: JointDiagram) -> str:
    """The same as tables."""
    rules = [
        (
            rule.sign,
            escaped(rule.name),
            escaped(f"{rule.other}: {' or '.join(rule.facts)} ({rule.reason})"),
            escaped("; ".join(_refused(diagram, rule))),
        )
        for rule in diagram.rules
    ]
    asked = [(escaped(one.effect), escaped(", then ".join(one.events))) for one in diagram.asked]
    parts = [
        f"# {escaped(diagram.title)}",
        markdown_table(("", "rule", "while", "refused"), rules),
        markdown_table((f"effect of {escaped(diagram.members[0].name)}", "asks of each other"), asked),
    ]
    return "\n\n".join(parts) + "\n"


def _refused(diagram: JointDiagram, rule: Between) -> list[str]:
    member = next(member for member in diagram.members if member.name == rule.machine)
    rows = {row for name, row, number in diagram.refused if (name, number) == (rule.machine, rule.number)}
    return [f"{entry.call} from {entry.source}" for entry in member.entries() if entry.row in rows]
