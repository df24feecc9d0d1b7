"""Rules over several machines: actor and engines that share a device, and the ranks of one actor.

Theory of operation. Each machine keeps its own table. A *link* says which event an effect of the leading machine asks
of each of the others; a *joint rule* refuses rows of one machine while facts of another are true, which no guard could
say, since guards see one machine; the *opening* is what is asked before the rules apply. A rule is about rows by their
effects, not by their names: a row added later is under it too. Everything is checked when it is declared, like a
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import field, frozen

from states.actor import ACTOR
from states.checks import describe
from states.extend import Insert, extended
from states.resources import CONDITIONS, AnyFact, Fact
from states.rollout import ENGINE_CONDITIONS, ROLLOUT, EngineFact
from states.spec import DefinitionError, Effect, MachineSpec, Row, facts_used


def _facts(values: Iterable[AnyFact]) -> frozenset[AnyFact]:
    return frozenset(values)


@frozen
class JointRule:
    """Rows of ``machine`` with any of ``effects`` are refused while any of ``forbids`` is true of any ``other``."""

    name: str
    reason: str
    advice: str
    machine: str
    effects: tuple[str, ...]
    other: str
    forbids: frozenset[AnyFact] = field(converter=_facts)

    def concerns(self, row: Row) -> bool:
        return any(effect in self.effects for effect in row.effects)


@frozen
class Link:
    """An effect of the leading machine asks this event of each of the others, unless a fact of it is true there."""

    effect: str
    event: str
    unless: frozenset[AnyFact] = field(default=frozenset(), converter=_facts)


@frozen
class JointSpec:
    """Machines that run together; the first one leads. Raises DefinitionError with every finding.

    ``opening`` lists (machine, event): asked first, in this order, of machines in their initial states. From there on
    the rules hold, and with them that no two machines between which there are rules have what these forbid at once.
    """

    name: str
    members: tuple[MachineSpec, ...]
    links: tuple[Link, ...] = ()
    rules: tuple[JointRule, ...] = ()
    opening: tuple[tuple[str, str], ...] = ()

    def __attrs_post_init__(self) -> None:
        if found := [*_bad_members(self)] or [*_bad_links(self), *_bad_rules(self), *_bad_opening(self)]:
            raise DefinitionError(self.name, found)

    @property
    def leader(self) -> MachineSpec:
        return self.members[0]

    def member(self, name: str) -> MachineSpec:
        return next(spec for spec in self.members if spec.name == name)

    def rules_for(self, machine: str, row: Row) -> tuple[JointRule, ...]:
        """The rules that this row is under."""
        return tuple(rule for rule in self.rules if rule.machine == machine and rule.concerns(row))

    def linked(self, effect: str) -> tuple[Link, ...]:
        """What an effect of the leading machine asks of the others, in order."""
        return tuple(link for link in self.links if link.effect == effect)


@frozen
class RankRules:
    """What the ranks of one actor do together. Raises DefinitionError with every finding.

    An event is asked of every rank. Until the effect ``agree`` each of them can refuse or fail, and then all undo what
    they did, and none has changed. After it nothing is refused; a rank that faults takes all others with it, by the
    event ``spread``. A choice between rows is made once for all: a fact in ``together`` that is true on any rank counts
    as true on every rank.
    """

    name: str
    machine: MachineSpec
    spread: str
    together: frozenset[AnyFact] = field(converter=_facts)

    def __attrs_post_init__(self) -> None:
        if found := [*_bad_ranks(self)]:
            raise DefinitionError(self.name, found)

    @property
    def agree(self) -> str:
        return self.machine.agree


def _bad_members(spec: JointSpec) -> Iterator[str]:
    names = [member.name for member in spec.members]
    if len(names) < 2:
        yield "rules are over two machines at least"
    for name in {name for name in names if names.count(name) > 1}:
        yield f"machine {name!r} is a member twice"
    texts: dict[str, str] = {}
    for member in spec.members:
        for fact in {fact for facts in facts_used(member) for fact in facts if not isinstance(fact, Fact)}:
            if texts.setdefault(fact, member.name) != member.name:
                yield f"{member.name} and {texts[fact]} have a fact in common: {fact.name}"


def _bad_links(spec: JointSpec) -> Iterator[str]:
    effects = {effect.name for effect in spec.leader.effects}
    for link in spec.links:
        if link.effect not in effects:
            yield f"link from {link.effect}: {spec.leader.name} has no such effect"
        for member in spec.members[1:]:
            if link.event not in {event.name for event in member.events}:
                yield f"link from {link.effect}: {member.name} has no event {link.event!r}"


def _bad_rules(spec: JointSpec) -> Iterator[str]:
    names = {member.name for member in spec.members}
    for rule in spec.rules:
        if [known.name for known in spec.rules].count(rule.name) > 1:
            yield f"rule {rule.name}: declared more than once"
        if unknown := [name for name in (rule.machine, rule.other) if name not in names]:
            yield f"rule {rule.name}: unknown machine {', '.join(map(repr, unknown))}"
            continue
        if rule.machine == rule.other:
            yield f"rule {rule.name}: a machine's own facts are for its guards"
        machine, other = spec.member(rule.machine), spec.member(rule.other)
        for effect in rule.effects:
            if effect not in {known.name for known in machine.effects}:
                yield f"rule {rule.name}: {machine.name} has no effect {effect!r}"
        if not any(rule.concerns(row) for row in machine.rows):
            yield f"rule {rule.name}: no row of {machine.name} is under it"
        for fact in sorted(rule.forbids & (CONDITIONS | ENGINE_CONDITIONS)):
            yield f"rule {rule.name}: {fact.name} is a condition of one call"
        for fact in sorted(rule.forbids - {fact for facts in facts_used(other) for fact in facts}):
            yield f"rule {rule.name}: {other.name} knows no fact {fact.name}"


def _bad_opening(spec: JointSpec) -> Iterator[str]:
    for name, event in spec.opening:
        events = {known.name for member in spec.members if member.name == name for known in member.events}
        if event not in events:
            yield f"opening: {name!r} has no event {event!r}"


def _bad_ranks(rules: RankRules) -> Iterator[str]:
    machine = rules.machine
    if machine.agree not in {effect.name for effect in machine.effects}:
        yield f"{machine.name} has no effect {machine.agree!r}"
    if rules.spread not in {event.name for event in machine.events}:
        yield f"{machine.name} has no event {rules.spread!r}"
    chosen = {fact for row in machine.rows for fact in row.when | row.unless}
    for fact in sorted(rules.together - chosen):
        yield f"no row of {machine.name} is chosen by {fact.name}"
    for row in machine.rows:
        after = row.effects[row.effects.index(machine.agree) + 1 :] if machine.agree in row.effects else ()
        if machine.agree in after:
            yield f"{describe(row)}: agrees twice"


COLOCATED = JointSpec(
    name="colocated",
    members=(ACTOR, ROLLOUT),
    links=(
        # an engine of which nobody knows what it holds is told abort_update before begin_update
        Link("pause_generation", "pause_generation"),
        Link("continue_untouched", "continue_generation"),
        Link("flush_caches", "flush_cache"),
        Link("send_weights", "begin_update"),
        Link("send_weights", "receive", unless=[EngineFact.READS_ITSELF]),
        Link("abort_updates", "abort_update"),
        Link("check_engines", "check_weights"),
        Link("end_updates", "end_update"),
        Link("continue_generation", "continue_generation"),
    ),
    rules=(
        # out before in: what one maps the other has given back, or both are refused memory half-way
        JointRule(
            "engines_out",
            "engines hold memory of this device",
            "Call release() of Colocated first, or to_training().",
            machine="actor",
            effects=("resume_actor_regions", "resume_forward_regions", "bring_back"),
            other="rollout",
            forbids=[EngineFact.WEIGHTS_IN, EngineFact.KV_IN],
        ),
        JointRule(
            "actor_out",
            "the actor holds memory of this device",
            "Call sleep() of Colocated first, or to_rollout().",
            machine="rollout",
            effects=("resume_weights", "resume_kv_cache"),
            other="actor",
            forbids=[Fact.WEIGHTS, Fact.OPTIMIZER, Fact.GRADS, Fact.REST],
        ),
    ),
    # both begin with their memory mapped: who comes second finds the device free
    opening=(("rollout", "release_weights"), ("rollout", "release_kv_cache")),
)

RANK_RULES = RankRules(
    name="ranks",
    machine=ACTOR,
    spread="fault",
    together=[Fact.WEIGHTS_LOST],
)

#: Events that ranks meet for.
MET = ("sleep", "wake_up", "switch", "begin_training", "load", "start_sync")

#: The actor's machine as one of several ranks: right before it agrees it waits for what the others say. Events that
#: end what these begin are not met for: one rank's failure there is a fault, which takes the others along.
RANKED = extended(
    ACTOR,
    "ranked",
    effects=[Effect("meet_ranks", "Every rank is ready to go on; if one is not, none does.", harmless=True)],
    insert=[
        Insert(
            "meet_ranks",
            MET,
            before=RANK_RULES.agree,
        )
    ],
)
