"""What a picture of a machine shows, as values. Knows nothing about Graphviz, Mermaid or Markdown.

A row of the table becomes one ``Entry``. An entry whose state stays the same is listed inside its node; all entries
with one source and one target share an ``Edge``. A row that leads back to where its state was entered from gives one
entry per origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

from attrs import frozen

from lifecycle.render.options import Detail

_IN_NO_DOCUMENT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Kind(StrEnum):
    """What an edge or an entry stands for, which decides how heavily it is drawn."""

    NORMAL = "normal"
    NOOP = "noop"  # succeeds without work, in the same state
    FAULT = "fault"  # an effect could not be undone
    CLOSING = "closing"  # leads to a final state


class Mark(StrEnum):
    """Where something stands in a highlighted path."""

    PLAIN = "plain"  # nothing is highlighted
    FADED = "faded"  # not on the path
    PATH = "path"
    LAST = "last"  # the step that breaks the invariant


@frozen
class DrawnEffect:
    """One effect of a row."""

    name: str
    agrees: bool  # the line between what can be undone and what can not
    no_return: bool
    fatal: bool


@frozen
class Entry:
    """A row as it is drawn. ``row`` counts the rows of the table from 1; ``number`` is its line of the legend, or 0."""

    row: int
    event: str
    tag: str  # which tags it is for, in words, or ""
    conditions: tuple[str, ...]
    source: str
    target: str
    kind: Kind
    effects: tuple[DrawnEffect, ...] = ()
    guards: tuple[str, ...] = ()
    number: int = 0
    steps: tuple[int, ...] = ()
    mark: Mark = Mark.PLAIN

    @property
    def call(self) -> str:
        return f"{self.event}({self.tag})" if self.tag else self.event

    @property
    def text(self) -> str:
        return self.call + "".join(f" [{condition}]" for condition in self.conditions)


@frozen
class Attempt:
    """A step of a highlighted path that is no row of its own: undone, a fault, or a move of the environment."""

    step: int
    text: str


@frozen
class Edge:
    """An arrow. One from ``many`` states starts at a stub that names them, and has no ``source``."""

    source: str
    target: str
    kind: Kind
    entries: tuple[Entry, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    mark: Mark = Mark.PLAIN
    broken: bool = False  # dashed: the path did not go through
    many: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(entry.row for entry in self.entries)


@frozen
class Node:
    name: str
    doc: str
    final: bool = False
    fault: bool = False
    tags: tuple[str, ...] | None = None  # of a state that is there once per tag
    origins: tuple[str, ...] | None = None  # of a state that remembers where it was entered from
    inside: tuple[Entry, ...] = ()
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    current: str | None = None  # the state as users read it, where a live actor is in it
    mark: Mark = Mark.PLAIN


@frozen
class LegendLine:
    """Rows that do the same, under one number. Where the picture shows contracts, rows that ask for the same."""

    number: int
    calls: tuple[str, ...]
    conditions: tuple[str, ...]
    ways: tuple[tuple[str, str], ...]  # source and target
    effects: tuple[DrawnEffect, ...]
    guards: tuple[str, ...]


@frozen
class Diagram:
    """One machine at one detail."""

    name: str
    title: str
    detail: Detail
    initial: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    legend: tuple[LegendLine, ...] = ()
    words: tuple[tuple[str, str], ...] = ()  # short name of a fact, and what it says
    subtitle: str = ""

    def entries(self) -> Iterator[Entry]:
        for node in self.nodes:
            yield from node.inside
        for edge in self.edges:
            yield from edge.entries

    def ident(self, name: str) -> str:
        """The state's name where every format takes it as an identifier, and one made up otherwise."""
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            return name
        return f"state_{[node.name for node in self.nodes].index(name)}"


def plain_text(text: str) -> str:
    """The text on one line, without characters that no document may hold."""
    return _IN_NO_DOCUMENT.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))
