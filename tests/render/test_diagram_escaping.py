"""Names that a format could read as its own."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from render_help import ODD, odd_machine

from lifecycle.render.dot import to_dot
from lifecycle.render.extract import extract
from lifecycle.render.images import render
from lifecycle.render.markdown import to_markdown
from lifecycle.render.mermaid import to_mermaid
from lifecycle.render.model import plain_text
from lifecycle.render.options import Detail


@pytest.mark.usefixtures("needs_dot")
@pytest.mark.parametrize("detail", list(Detail))
def test_svg_shows_every_odd_name(detail):
    """Graphviz takes the text, the SVG is XML, and the names are in it as they were."""
    root = ElementTree.fromstring(render(to_dot(extract(odd_machine(), detail)), "svg"))
    texts = [(element.text or "").replace("\xa0", " ") for element in root.iter() if element.tag.endswith("text")]

    for name in ODD:
        assert name in texts


def test_mermaid_writes_signs_as_numbers():
    """No quote, bracket or backtick of a name is left for Mermaid to read, and no name is an identifier there."""
    for line in to_mermaid(extract(odd_machine(), Detail.EFFECTS)).splitlines():
        if "|" in line and "-->" in line:
            assert line.count("|") == 2
            assert line.count('"') == 2
        assert "`" not in line
        assert not line.strip().startswith("end")


def test_markdown_tables_keep_their_columns():
    """A bar or a line break in a name starts no new cell."""
    text = to_markdown(extract(odd_machine(), Detail.EFFECTS))
    rows = [line for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]

    assert len(rows) == len(ODD)
    assert {line.replace("\\|", "").count("|") for line in rows} == {6}
    assert "<b>" not in text


def test_plain_text_is_one_clean_line():
    """Line breaks become spaces, and what XML can not hold becomes a sign."""
    assert plain_text("a\n b\x07c\ud800") == "a b\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}"
