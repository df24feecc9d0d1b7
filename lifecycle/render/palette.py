"""Colours of the pictures, light and dark. After Okabe and Ito: told apart by the colour-blind, and never alone.

Each light colour is one name; ``dark_style`` rewrites it where the reader's screen is dark. Texts have a contrast of at
least 4.5 on their background in both.
"""

from __future__ import annotations

PAPER = "#ffffff"
INK = "#1c1c1c"
MUTED = "#5c5c5c"  # no-ops, faults, docs: still text
LINE = "#8a8a8a"  # thin lines beside the way
FAINT = "#d4d4d4"  # borders of tables
FADED = "#6a6a6a"  # what a highlighted path leaves aside
BOX = "#f3f7fb"  # inside of a state
TITLE = "#dcebf7"  # its heading
MARKED = "#fff3c4"  # heading of the state a live actor is in
BLUE = "#0072b2"
VERMILLION = "#b34a00"  # the palette's D55E00, darker, so that texts keep their contrast
GREEN = "#007353"  # the palette's 009E73, darker for the same reason
FAULTY = "#fbe9dd"  # heading of the state after a fault
ENDED = "#e9e9e9"  # heading of a final state

DARK: dict[str, str] = {
    PAPER: "#0d1117",
    INK: "#e8e8e8",
    MUTED: "#a8a8a8",
    LINE: "#808080",
    FAINT: "#3d444d",
    FADED: "#8b8b8b",
    BOX: "#151b23",
    TITLE: "#16324a",
    MARKED: "#4a3c00",
    BLUE: "#56b4e9",
    VERMILLION: "#ff9a4d",
    GREEN: "#2fc79a",
    FAULTY: "#43200a",
    ENDED: "#2d3238",
}


def dark_style() -> str:
    """CSS that turns every light colour of a picture into its dark one where the reader prefers dark."""
    rules = [
        f'[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in sorted(DARK.items())
        for attribute in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme:dark){" + "".join(rules) + "}"


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, from 1 to 21, as the Web Content Accessibility Guidelines define it."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
