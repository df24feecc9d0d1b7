"""A highlighted path, and the state a live actor is in."""

from __future__ import annotations

import pytest
from render_help import small_machine, small_trace

from lifecycle.checker.trace import Step, Trace
from lifecycle.render.dot import to_dot
from lifecycle.render.draw import diagram_of
from lifecycle.render.extract import extract
from lifecycle.render.highlight import highlight
from lifecycle.render.markdown import to_markdown
from lifecycle.render.mermaid import to_mermaid
from lifecycle.render.model import Kind, Mark
from lifecycle.render.options import Detail
from states.actor import ACTOR

SMALL = small_machine()


def marks(diagram):
    return {(edge.source, edge.target): edge.mark for edge in diagram.edges}


def test_steps_are_numbered_and_the_last_is_warned_of():
    """The path is strong, its last step in the warning colour, everything else faded, the invariant in the title."""
    diagram = diagram_of(SMALL, Detail.STATES, trace=small_trace("done", "stopped"))

    assert marks(diagram)["ON", "OFF"] is Mark.PATH
    assert marks(diagram)["OFF", "ON"] is Mark.LAST
    assert marks(diagram)["ON", "FAULTED"] is Mark.FADED
    assert diagram.subtitle == "✗ nothing is cut: it hurts"
    for text in (to_dot(diagram), to_mermaid(diagram), to_markdown(diagram)):
        assert "▶1" in text
        assert "✗2" in text
        assert "nothing is cut" in text


def test_an_undone_step_is_a_dashed_loop_at_its_source():
    """It is no row of its own, and changes no count of rows."""
    diagram = diagram_of(SMALL, Detail.STATES, trace=small_trace("done", "undone"))
    loop = next(edge for edge in diagram.edges if edge.attempts)

    assert (loop.source, loop.target, loop.broken, loop.mark) == ("OFF", "OFF", True, Mark.LAST)
    assert loop.attempts[0].text == "start undone"
    assert "dashed" in next(line for line in to_dot(diagram).splitlines() if "start undone" in line)
    assert "start undone" in to_mermaid(diagram)
    assert "| ✗2 | start undone | OFF | OFF |" in to_markdown(diagram)


def test_a_fault_leads_to_the_faulted_state():
    """The arrow starts where the step did."""
    diagram = diagram_of(SMALL, Detail.STATES, trace=small_trace("done", "fault"))

    assert [(e.source, e.target) for e in diagram.edges if e.attempts] == [("OFF", "FAULTED")]
    assert next(node for node in diagram.nodes if node.name == "FAULTED").mark is Mark.LAST


def test_a_row_taken_out_of_many_has_its_own_arrow():
    """The stub keeps the other states."""
    steps = (Step("sleep", None, "SWITCHED(ref)", "ASLEEP", "done"), Step("close", None, "ASLEEP", "CLOSED", "done"))
    diagram = diagram_of(ACTOR, Detail.STATES, trace=Trace("actor", "i", "", "", ("ref",), steps))
    closing = [edge for edge in diagram.edges if edge.kind is Kind.CLOSING]

    assert {(edge.source, edge.many) for edge in closing} == {
        ("", ("RESIDENT", "SWITCHED", "SYNCING", "FAULTED")),
        ("ASLEEP", ()),
    }


def test_the_tag_chooses_the_row():
    """wake_up(ref) is not wake_up(actor)."""
    steps = (
        Step("wake_up", "ref", "ASLEEP", "SWITCHED(ref)", "done"),
        Step("wake_up", "ref", "SWITCHED(ref)", "SWITCHED(ref)", "done"),
    )
    diagram = diagram_of(ACTOR, Detail.STATES, trace=Trace("actor", "i", "", "", ("ref",), steps))

    taken = {e.call: e.steps for e in diagram.entries() if e.steps}

    assert taken == {"wake_up(tag)": (1,), "wake_up(same tag)": (2,)}


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (Trace("other", "i", "", "", (), ()), "of machine 'other'"),
        (Trace("small", "i", "", "", (), ()), "no steps"),
        (Trace("small", "i", "", "", (), (Step("stop", None, "ON", "MOON", "done"),)), "no state 'MOON'"),
    ],
)
def test_a_trace_of_something_else_is_refused(trace, said):
    """The message names what does not fit."""
    with pytest.raises(ValueError, match=said):
        highlight(extract(SMALL), SMALL, trace)


def test_the_current_state_is_marked():
    """A double border, a filled heading, a dot, and the tag."""
    diagram = extract(ACTOR, Detail.STATES, ("ref",), current="SWITCHED(ref)")
    text = to_dot(diagram)

    assert [node.name for node in diagram.nodes if node.current] == ["SWITCHED"]
    assert "● SWITCHED(ref)" in text
    assert 'class="state current"' in text
    assert "● SWITCHED(ref)" in to_mermaid(diagram).replace("#40;", "(").replace("#41;", ")")
    assert "now: SWITCHED(ref)" in to_markdown(diagram)
    assert "current" not in to_dot(extract(ACTOR, Detail.STATES, ("ref",)))


def test_a_current_state_that_is_none_is_refused():
    """It names the known ones."""
    with pytest.raises(ValueError, match="RESIDENT, SWITCHED"):
        extract(ACTOR, current="NOWHERE")
