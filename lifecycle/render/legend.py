"""What stands under a picture: its numbered rows, its short words, and its signs."""

from __future__ import annotations

from lifecycle.render import labels, palette
from lifecycle.render.labels import cell, font, line, table, words
from lifecycle.render.model import Diagram, Kind, LegendLine
from lifecycle.render.options import Detail

WIDTH = 122  # characters of a line


def legend(diagram: Diagram) -> str:
    """The table under the picture."""
    numbered = [_numbered(diagram)] if diagram.legend else []
    signs = font(_signs(diagram), palette.MUTED)
    if diagram.detail is not Detail.CONTRACTS:
        parts = [*numbered, *([_facts(diagram)] if diagram.words else []), signs]
        return table((line(cell(part)) for part in parts), 0, 3)
    beside = [*numbered, table([line(cell(_glossary(diagram))), line(cell(signs))], 0, 3)]
    return table([line(*(cell(part, "LEFT", ' VALIGN="TOP"') for part in beside))], 0, 3, 4)


def _numbered(diagram: Diagram) -> str:
    contracts = diagram.detail is Detail.CONTRACTS
    head = ("no.", "event", "guards") if contracts else ("no.", "event", "from → to", "effects in order")
    rows = [line(*(cell(font(f"<B>{text}</B>", palette.INK)) for text in head)), "<HR/>"]
    rows += [_guards(one) if contracts else _effects(one) for one in diagram.legend]
    return table(rows, 1, 1.5, 0, f' COLOR="{palette.LINE}"')


def _effects(one: LegendLine) -> str:
    what = labels.wrapped([labels.effect(effect) for effect in one.effects], WIDTH, " · ")
    texts = "<BR/>".join([*map(words, one.calls), *(f"<I>[{words(condition)}]</I>" for condition in one.conditions)])
    return _line(one, texts, _ways(one), what)


def _guards(one: LegendLine) -> str:
    calls = labels.wrapped([(call, words(call)) for call in one.calls], 30, ", ")
    return _line(one, calls, labels.wrapped([(name, words(name)) for name in one.guards], 68, " · "))


def _line(one: LegendLine, *texts: str) -> str:
    more = ' VALIGN="TOP"' + (f' BGCOLOR="{palette.BOX}"' if one.number % 2 else "")
    return line(*(cell(font(text, palette.INK), "LEFT", more) for text in (f"<B>{one.number}</B>", *texts)))


def _ways(one: LegendLine) -> str:
    """Sources with one target on one line."""
    by_target: dict[str, list[str]] = {}
    for source, target in one.ways:
        by_target.setdefault("" if source == target else target, []).append(source)
    parts = []
    for target, sources in by_target.items():
        parts.append(words(", ".join(sources) + (f" → {target}" if target else "")))
    return "<BR/>".join(parts)


def _facts(diagram: Diagram) -> str:
    """The short words in a paragraph."""
    parts = [(f"{name}: {said}", f"<B>{words(name)}</B>: {words(said)}") for name, said in diagram.words]
    return font(labels.wrapped(parts, 160, "; "), palette.INK)


def _glossary(diagram: Diagram) -> str:
    """The short words, each on a line of its own."""
    lines = []
    for name, said in diagram.words:
        spoken = [(word, words(word)) for word in said.split()]
        text = labels.wrapped([(name + ":", f"<B>{words(name)}</B>:"), *spoken], 76, " ", "&#160;" * 4)
        lines.append(text)
    return font("<BR/>".join(lines) or "&#160;", palette.INK)


def _signs(diagram: Diagram) -> str:
    """What the signs mean that this picture has."""
    effects = [effect for entry in diagram.entries() for effect in entry.effects]
    kinds = {entry.kind for entry in diagram.entries()}
    shown = diagram.detail is Detail.EFFECTS
    contracts = diagram.detail is Detail.CONTRACTS
    signs = {
        f"{labels.UNDOABLE} can be undone": shown and bool(effects),
        f"{labels.AGREE} all ranks agree": shown and any(effect.agrees for effect in effects),
        f"{labels.NO_RETURN} point of no return": shown and any(effect.no_return for effect in effects),
        f"{labels.FATAL} its failure may end the process": shown and any(effect.fatal for effect in effects),
        "✓ is true there": contracts,
        "✗ is not": contracts,
        "italic grey: nothing to do": Kind.NOOP in kinds,
        "dashed: a fault": Kind.FAULT in kinds,
        "thin: the end": Kind.CLOSING in kinds,
    }
    return "&#160;&#160;&#160;&#160;".join(words(sign) for sign, there in signs.items() if there) or "&#160;"
