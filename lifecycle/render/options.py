"""What can be asked of a picture."""

from __future__ import annotations

from enum import StrEnum


class Detail(StrEnum):
    """How much a picture tells."""

    STATES = "states"  # states and events
    EFFECTS = "effects"  # and what each event does, in order
    CONTRACTS = "contracts"  # and what each state promises, and what each event asks for


class Format(StrEnum):
    """What a picture can be written as. The last three are text and need nothing installed."""

    SVG = "svg"
    PNG = "png"
    PDF = "pdf"
    DOT = "dot"
    MERMAID = "mermaid"
    MARKDOWN = "markdown"
