"""Machines that run together: side by side, with the rules between them as dashed lines.

Each member has a picture of its own with all its rows. This one names only what machines ask and refuse each other;
every other arrow is thin and bare.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from lifecycle.render.extract import extract, in_order, short
from lifecycle.render.model import Diagram, Entry, plain_text
from lifecycle.render.options import Detail
from states.joint import JointSpec


@frozen
class Between:
    """A rule: in ``blocked`` states of ``machine`` its rows are refused while ``other`` is in one of ``holding``."""

    number: int
    name: str
    reason: str
    machine: str
    other: str
    facts: tuple[str, ...]
    holding: tuple[str, ...]
    blocked: tuple[str, ...]

    @property
    def sign(self) -> str:
        return f"⊘{self.number}"


@frozen
class Asked:
    """An effect of the leading machine, and the events of the others it asks, in order."""

    effect: str
    events: tuple[str, ...]


@frozen
class JointDiagram:
    """Members, the rules between them, and what the first asks of the others."""

    name: str
    title: str
    members: tuple[Diagram, ...]
    rules: tuple[Between, ...]
    asked: tuple[Asked, ...]
    refused: tuple[tuple[str, int, int], ...]  # member, row, rule

    def signs(self, member: str, entry: Entry) -> str:
        """The rules that an entry is under, as signs, and whether another machine asks for it."""
        rules = [f"⊘{rule}" for name, row, rule in self.refused if (name, row) == (member, entry.row)]
        asks = {event.partition(" ")[0] for one in self.asked for event in one.events}
        follows = ["◁"] if member != self.members[0].name and entry.event in asks else []
        return "".join([*rules, *follows])

    def ident(self, member: str, state: str) -> str:
        """A state's name in the texts."""
        number = [known.name for known in self.members].index(member)
        return f"m{number}_{self.members[number].ident(state)}"

    def said(self, member: Diagram, entries: Iterable[Entry]) -> list[str]:
        """What is written for these entries: those under a rule, and those that another machine asks for."""
        found = ((self.signs(member.name, entry), entry.call) for entry in entries)
        return list(dict.fromkeys(f"{signs} {call}" for signs, call in found if signs))


def extract_joint(spec: JointSpec) -> JointDiagram:
    """The picture of machines that run together. Pure."""
    refused = tuple(
        (plain_text(member.name), row, number)
        for member in spec.members
        for row, declared in enumerate(member.rows, 1)
        for number, rule in enumerate(spec.rules, 1)
        if rule.machine == member.name and rule.concerns(declared)
    )
    return JointDiagram(
        name=plain_text(spec.name),
        title=f"The {plain_text(spec.name)} machines",
        members=tuple(extract(member, Detail.STATES) for member in spec.members),
        rules=tuple(_between(spec, number) for number in range(1, len(spec.rules) + 1)),
        asked=_asked(spec),
        refused=refused,
    )


def _between(spec: JointSpec, number: int) -> Between:
    rule = spec.rules[number - 1]
    machine, other = spec.member(rule.machine), spec.member(rule.other)
    concerned = {row.source for row in machine.rows if rule.concerns(row)}
    return Between(
        number,
        plain_text(rule.name),
        plain_text(rule.reason),
        plain_text(rule.machine),
        plain_text(rule.other),
        tuple(short(fact) for fact in in_order(rule.forbids)),
        tuple(state.name for state in other.states if state.holds & rule.forbids),
        tuple(state.name for state in machine.states if state.name in concerned),
    )


def _asked(spec: JointSpec) -> tuple[Asked, ...]:
    asked: dict[str, list[str]] = {}
    for link in spec.links:
        unless = ", ".join(short(fact) for fact in in_order(link.unless))
        event = plain_text(link.event) + (f" [not {unless}]" if unless else "")
        asked.setdefault(plain_text(link.effect), []).append(event)
    return tuple(Asked(effect, tuple(events)) for effect, events in asked.items())
