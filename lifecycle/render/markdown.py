"""A picture as Markdown tables, for readers and for programs that draw nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lifecycle.render.labels import AGREE, FATAL, NO_RETURN, steps
from lifecycle.render.model import Diagram, DrawnEffect, Edge, Entry, Kind, Node, plain_text
from lifecycle.render.options import Detail


def to_markdown(diagram: Diagram) -> str:
    """The same text for the same picture, byte for byte."""
    parts = [f"# {escaped(diagram.title)}"]
    if diagram.subtitle:
        parts.append(f"**{escaped(diagram.subtitle)}**")
    parts += [_states(diagram), _moves(diagram)]
    if any(edge.attempts for edge in diagram.edges):
        parts.append(_attempts(diagram.edges))
    if diagram.words:
        parts.append("\n".join(f"- {escaped(word)}: {escaped(text)}" for word, text in diagram.words))
    if diagram.detail is Detail.EFFECTS:
        parts.append(
            f"{AGREE} all ranks agree; {NO_RETURN} point of no return; {FATAL} its failure may end the process; all "
            "other effects can be undone."
        )
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """The text on one line, with everything that Markdown, HTML or a table could read taken literally."""
    text = plain_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*[]|~#":
        text = text.replace(sign, "\\" + sign)
    return text.replace("_", "\\_") if text.startswith("_") or text.endswith("_") or "__" in text else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def effects_text(effects: Iterable[DrawnEffect], link: Callable[[str], str] = escaped) -> str:
    """Effects in order, with their signs. ``link`` writes a name."""
    return " · ".join(_effect(effect, link) for effect in effects)


def _effect(effect: DrawnEffect, link: Callable[[str], str]) -> str:
    name = link(effect.name) + (FATAL if effect.fatal else "")
    if effect.agrees:
        return f"**{AGREE} {name} {AGREE}**"
    return f"**{NO_RETURN} {name}**" if effect.no_return else name


def _states(diagram: Diagram) -> str:
    contracts = diagram.detail is Detail.CONTRACTS
    head = ["state", "", "what is true"] + ["holds", "lacks"] * contracts
    return table(head, (_state(diagram, node, contracts) for node in diagram.nodes))


def _state(diagram: Diagram, node: Node, contracts: bool) -> list[str]:
    notes = [
        "initial" if node.name == diagram.initial else "",
        "final" if node.final else "",
        "" if node.tags is None else f"one per tag: {', '.join(node.tags) or 'none'}",
        "" if node.origins is None else f"remembers: {', '.join(node.origins)}",
        "" if node.current is None else f"● now: {node.current}",
    ]
    cells = [f"**{escaped(node.name)}**", escaped("; ".join(filter(None, notes))), escaped(node.doc)]
    return cells + [escaped(", ".join(facts)) for facts in (node.holds, node.lacks)] * contracts


def _moves(diagram: Diagram) -> str:
    head = ["row", "event", "from", "to"]
    head += {Detail.STATES: [], Detail.EFFECTS: ["effects in order"], Detail.CONTRACTS: ["guards"]}[diagram.detail]
    entries = sorted(diagram.entries(), key=lambda entry: entry.row)
    return table(head, (_move(diagram.detail, entry) for entry in entries))


def _move(detail: Detail, entry: Entry) -> list[str]:
    text = escaped(entry.text)
    if entry.kind is Kind.NOOP:
        text = f"*{text}*"
    if entry.steps:
        text = f"**{steps(entry.steps, entry.mark)}** {text}"
    cells = [str(entry.row), text, escaped(entry.source), "same" if entry.source == entry.target else ""]
    cells[3] = escaped(entry.target) if not cells[3] or entry.tag == "other tag" else cells[3]
    if detail is Detail.EFFECTS:
        return [*cells, effects_text(entry.effects) or "nothing to do"]
    return [*cells, ", ".join(map(escaped, entry.guards))] if detail is Detail.CONTRACTS else cells


def _attempts(edges: Iterable[Edge]) -> str:
    rows = [
        (steps((one.step,), edge.mark), escaped(one.text), escaped(edge.source), escaped(edge.target))
        for edge in edges
        for one in edge.attempts
    ]
    return table(("step", "tried", "from", "to"), rows)
