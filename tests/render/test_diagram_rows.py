"""Nothing is lost and nothing is made up: every row is in every picture once."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from itertools import pairwise

import pytest
from render_help import odd_machine, small_machine

from lifecycle.render.declared import TAGS, declared
from lifecycle.render.dot import to_dot
from lifecycle.render.extract import extract, origins_of
from lifecycle.render.markdown import to_markdown
from lifecycle.render.mermaid import to_mermaid
from lifecycle.render.model import Kind
from lifecycle.render.options import Detail
from states.spec import ORIGIN

MACHINES = {**declared(), "odd": odd_machine(), "small": small_machine()}
CASES = [pytest.param(name, detail, id=f"{name}-{detail}") for name in MACHINES for detail in Detail]


def expected(spec) -> Counter:
    """Each row once; one that leads back to its origin once per origin."""
    return Counter(
        {
            number: len(origins_of(spec, row.source)) if row.target == ORIGIN else 1
            for number, row in enumerate(spec.rows, 1)
        }
    )


def drawn(name, detail):
    return extract(MACHINES[name], detail, TAGS.get(name, ("ref",)))


def commented(text: str, sign: str) -> Counter:
    """The rows named by the comments before the statements that draw them."""
    found = re.findall(rf"^\s*{re.escape(sign)} rows ([\d ]+)$", text, re.MULTILINE)
    return Counter(int(number) for rows in found for number in rows.split())


@pytest.mark.parametrize(("name", "detail"), CASES)
def test_every_row_is_in_the_model(name, detail):
    """Inside a node or on an edge, never both."""
    assert Counter(entry.row for entry in drawn(name, detail).entries()) == expected(MACHINES[name])


@pytest.mark.parametrize(("name", "detail"), CASES)
def test_every_row_is_in_the_dot_text(name, detail):
    """By its comment, and as many texts as the model has."""
    diagram = drawn(name, detail)
    text = to_dot(diagram)

    assert commented(text, "//") == expected(MACHINES[name])
    arrows = [line for line in text.splitlines() if "-> " in line and 'class="edge' in line]
    assert len(arrows) == len(diagram.edges)


@pytest.mark.parametrize(("name", "detail"), CASES)
def test_every_row_is_in_the_mermaid_text(name, detail):
    """By its comment, and as many arrows as the model has, beside the one to the initial state."""
    diagram = drawn(name, detail)
    text = to_mermaid(diagram)

    assert commented(text, "%%") == expected(MACHINES[name])
    assert len(re.findall(r"^  \S+ -\.?->\|", text, re.MULTILINE)) == len(diagram.edges)


@pytest.mark.parametrize(("name", "detail"), CASES)
def test_every_row_is_in_the_markdown_text(name, detail):
    """One line of the table each."""
    lines = re.findall(r"^\| (\d+) \|", to_markdown(drawn(name, detail)), re.MULTILINE)

    assert Counter(map(int, lines)) == expected(MACHINES[name])


@pytest.mark.parametrize(("name", "detail"), CASES)
def test_texts_are_stable(name, detail):
    """The same machine gives the same bytes."""
    for render in (to_dot, to_mermaid, to_markdown):
        assert render(drawn(name, detail)) == render(drawn(name, detail))


@pytest.mark.parametrize("detail", list(Detail))
def test_every_event_is_written_beside_its_row(detail):
    """What an arrow or a node says names exactly its own rows' events."""
    diagram = drawn("actor", detail)
    lines = to_dot(diagram).splitlines()
    by_row = {entry.row: entry for entry in diagram.entries()}
    for comment, drawing in pairwise(lines):
        if not comment.strip().startswith("// rows"):
            continue
        calls = Counter(by_row[int(number)].call for number in comment.split()[2:])
        written = [unescape(part).split("\xa0")[0].split(" from ")[0] for part in re.findall(r">([^<>]+)<", drawing)]
        found = Counter(part.strip() for part in written if part.strip() in calls)
        assert found == calls or ("stub" in drawing and set(found) == set(calls)), drawing


def test_refused_events_are_not_drawn():
    """There is no arrow for what the table has no row for."""
    text = to_dot(drawn("small", Detail.STATES))

    assert "END ->" not in text
    assert len(re.findall("start", re.sub(r"<[^>]*>", " ", text))) == 3  # the dot of the start twice, and one arrow


def test_noops_are_drawn_thin():
    """A row without work is in italics inside its node, everything else is not."""
    diagram = drawn("actor", Detail.STATES)
    noops = [entry for node in diagram.nodes for entry in node.inside if entry.kind is Kind.NOOP]

    assert {(entry.event, entry.source) for entry in noops} >= {("sleep", "ASLEEP"), ("switch", "RESIDENT")}
    assert not any(edge.kind is Kind.NOOP for edge in diagram.edges)
    assert "<I>sleep</I>" in to_dot(diagram)
    assert "<i>sleep</i>" in to_mermaid(diagram)
    assert "| *sleep* | ASLEEP | same |" in to_markdown(diagram)


def test_rows_that_may_do_nothing_in_another_state_are_not_noops():
    """Only a row that keeps its state and has no effects is one."""
    for entry in drawn("actor", Detail.STATES).entries():
        assert (entry.kind is Kind.NOOP) <= (entry.source == entry.target and not entry.effects)


def test_many_faults_start_at_one_stub():
    """Arrows beside the way from many states are one arrow that names them."""
    fault = next(edge for edge in drawn("actor", Detail.STATES).edges if edge.kind is Kind.FAULT)

    assert fault.many == ("RESIDENT", "SWITCHED", "ASLEEP", "SYNCING")
    assert [edge.many for edge in drawn("small", Detail.STATES).edges if edge.kind is Kind.FAULT] == [(), ()]


def test_the_way_back_leads_to_each_origin():
    """A state that remembers where it was entered from has an arrow to each."""
    back = {e.target for e in drawn("actor", Detail.STATES).entries() if e.event == "finish_sync"}

    assert back == {"RESIDENT", "SWITCHED", "ASLEEP"}


def test_points_of_no_return_and_agreement_are_marked():
    """The signs stand in the order of the effects."""
    diagram = drawn("small", Detail.EFFECTS)

    for text in (to_dot(diagram), to_mermaid(diagram)):
        assert "○‖◆" in text
    assert "warm · **‖ agree ‖** · **◆ cut**" in to_markdown(diagram)


def test_tags_are_listed_in_one_box():
    """SWITCHED is one node that names its tags."""
    text = to_dot(drawn("actor", Detail.STATES))

    assert "SWITCHED(tag)" in text
    assert text.count(">old_actor<") == 1
    assert "one per tag: none" in to_markdown(extract(MACHINES["actor"], Detail.STATES, ("actor",)))
