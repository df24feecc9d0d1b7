"""Pieces of Graphviz's HTML-like labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lifecycle.render import palette
from lifecycle.render.model import DrawnEffect, Entry, Kind, Mark, plain_text

SIZE = 8  # points of all text but headings
SHORT = 24  # characters that still stand on one line of a text on an arrow
FEW = 4  # effects whose shape stands beside the event
UNDOABLE, NO_RETURN, AGREE, FATAL = "○", "◆", "‖", "†"
STEP_COLOUR = {Mark.PATH: palette.BLUE, Mark.LAST: palette.VERMILLION}


def words(text: str) -> str:
    """The text, safe inside a label."""
    return escape(plain_text(text), quote=True) or "&#160;"  # Graphviz takes no empty bold text


def font(text: str, colour: str, size: float | None = None) -> str:
    sized = "" if size is None else f' POINT-SIZE="{size:g}"'
    return f'<FONT COLOR="{colour}"{sized}>{text}</FONT>'


def table(rows: Iterable[str], border: float = 0, padding: float = 1, spacing: float = 0, more: str = "") -> str:
    return (
        f'<TABLE BORDER="{border:g}" CELLBORDER="0" CELLSPACING="{spacing:g}" CELLPADDING="{padding:g}"{more}>'
        + "".join(rows)
        + "</TABLE>"
    )


def line(*cells: str) -> str:
    return "<TR>" + "".join(cells) + "</TR>"


def cell(text: str, align: str = "LEFT", more: str = "") -> str:
    return f'<TD ALIGN="{align}" BALIGN="{align}"{more}>{text}</TD>'


def wrapped(parts: Sequence[tuple[str, str]], width: int, joint: str, indent: str = "") -> str:
    """Parts (as written, as marked up) joined and broken into lines of about ``width`` characters."""
    lines: list[list[str]] = [[]]
    used = 0
    for written, marked in parts:
        if lines[-1] and used + len(written) + len(joint) > width:
            lines.append([])
            used = 0
        used += len(written) + len(joint)
        lines[-1].append(marked)
    return f"<BR/>{indent}".join(joint.join(one) for one in lines)


def effect(one: DrawnEffect) -> tuple[str, str]:
    """An effect in the legend, as written and as marked up."""
    if one.agrees:
        return AGREE + " agree " + AGREE, f"<B>{AGREE} {words(one.name)} {AGREE}</B>"
    name = words(one.name) + (FATAL if one.fatal else "")
    if one.no_return:
        return f"{NO_RETURN} {one.name}xx", font(f"<B>{NO_RETURN} {name}</B>", palette.VERMILLION)
    return one.name, name


def strip(effects: Iterable[DrawnEffect]) -> str:
    """The shape of a row at a glance: what can be undone, where all agree, what can not be undone."""
    return "".join(AGREE if one.agrees else NO_RETURN if one.no_return else UNDOABLE for one in effects)


def entry(one: Entry, strips: bool, source: bool = False, under: bool = False) -> str:
    """A row on an edge or inside a node.

    ``source``: with where it starts. ``under``: its shape, and conditions of some length, on a line of their own.
    """
    colour = _colour(one)
    text = words(one.call)
    if one.number:
        text = f"<B>{one.number}</B> {text}"
    if source:
        text += f" from {words(one.source)}"
    shape = strip(one.effects) if strips else ""
    when = f"<I>[{words(', '.join(one.conditions))}]</I>" if one.conditions else ""
    beside, below = _placed(one, shape, when) if under else ([when, shape], [])
    if one.kind is Kind.NOOP:
        text = f"<I>{text}</I>"
    if one.steps:
        text = f"<B>{steps(one.steps, one.mark)}{':' if one.number else ''} {text}</B>"
    lines = ["&#160;&#160;".join(filter(None, [text, *beside])), "&#160;&#160;".join(filter(None, below))]
    return font("<BR/>".join(filter(None, lines)), colour)


def _placed(one: Entry, shape: str, when: str) -> tuple[list[str], list[str]]:
    """What stands beside the event, and what below it, so that the text on an arrow stays narrow."""
    length = sum(map(len, one.conditions))
    if len(shape) <= FEW:
        return ([shape], [when]) if length + len(one.call) > SHORT else ([shape, when], [])
    if length + len(shape) <= SHORT:
        return [], [shape, when]
    return [], [f"{shape}<BR/>{when}" if when else shape]


def steps(numbers: Iterable[int], mark: Mark) -> str:
    sign = "✗" if mark is Mark.LAST else "▶"
    return sign + ",".join(map(str, numbers))


def _colour(one: Entry) -> str:
    if one.mark in STEP_COLOUR:
        return STEP_COLOUR[one.mark]
    if one.mark is Mark.FADED:
        return palette.FADED
    return palette.MUTED if one.kind in (Kind.NOOP, Kind.FAULT) else palette.INK
