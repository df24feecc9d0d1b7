"""The picture of machines that run together."""

from __future__ import annotations

from lifecycle.render.joint import extract_joint
from lifecycle.render.joint_texts import to_dot, to_markdown, to_mermaid
from states.joint import COLOCATED

DIAGRAM = extract_joint(COLOCATED)


def test_every_row_under_a_rule_is_marked():
    """As often as the declaration says, and no other row."""
    for number, rule in enumerate(COLOCATED.rules, 1):
        member = COLOCATED.member(rule.machine)
        expected = {row for row, declared in enumerate(member.rows, 1) if rule.concerns(declared)}
        drawn = next(one for one in DIAGRAM.members if one.name == rule.machine)
        marked = {e.row for e in drawn.entries() if f"⊘{number}" in DIAGRAM.signs(rule.machine, e)}

        assert marked == expected


def test_every_link_is_told():
    """Each effect of the leading machine with each event it asks for."""
    told = {(one.effect, event.split()[0]) for one in DIAGRAM.asked for event in one.events}

    assert told == {(link.effect, link.event) for link in COLOCATED.links}
    text = to_markdown(DIAGRAM)
    assert "| send_weights | begin_update, then receive \\[not reads itself\\] |" in text


def test_rules_are_dashed_lines_between():
    """Two for each rule: to the machine it looks at, and to the one it refuses something."""
    lines = [line for line in to_dot(DIAGRAM).splitlines() if line.strip().startswith("rule_") and " -> " in line]
    dashed = [line for line in lines if "style=dashed" in line]

    assert len(dashed) == 2 * len(COLOCATED.rules)
    assert to_mermaid(DIAGRAM).count("-.-x") == sum(len(rule.blocked) for rule in DIAGRAM.rules)


def test_texts_of_several_machines_are_stable():
    """The same declaration gives the same bytes."""
    for render in (to_dot, to_mermaid, to_markdown):
        assert render(extract_joint(COLOCATED)) == render(DIAGRAM)
