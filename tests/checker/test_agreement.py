"""The checker's account of effects and guards is the run time's: both go through every reachable state side by side."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve
from choosing import Choice
from lockstep import Asking, Lockstep
from things import Pair

from lifecycle.checker.explore import explore
from lifecycle.checker.formula import bits_of, compiled
from lifecycle.checker.ground import Model, ground
from lifecycle.checker.words import Instance
from lifecycle.plan import find_row, holds, region_needs
from lifecycle.versions import ACTOR, Lease, Scope, sources
from states.resources import Copy, Fact

SMALLEST = Instance(tags=(), slots=("trained",), labels=())
KEEPING = evolve(
    SMALLEST,
    keep=frozenset(("optimizer", "grads", "workspaces")),
    keeps_addresses=False,
    stream_ordered=False,
    overlaps=False,
    restore_aborted=False,
)
LABELLED = Instance(tags=("ref",), slots=("trained",), labels=(ACTOR, "ref"))
TWO_TAGS = evolve(LABELLED, labels=())
TWO_SLOTS = evolve(TWO_TAGS, slots=("frozen", "trained"))

#: Explored to the end.
INSTANCES = [
    pytest.param(SMALLEST, id="smallest"),
    pytest.param(KEEPING, id="keeping"),
    pytest.param(TWO_TAGS, id="two-tags", marks=pytest.mark.slow),
]


@cache
def explored(instance: Instance, limit: int | None = None) -> Lockstep:
    found = Lockstep(ground(Model(instance=instance)))
    found.explore(limit)
    return found


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.timeout(3000)
def test_every_event_ends_where_the_checker_says(instance):
    found = explored(instance)
    assert not found.disagreements, "\n".join(found.disagreements[:20])


@pytest.mark.parametrize(
    ("instance", "limit"),
    [
        pytest.param(LABELLED, 60, id="labelled"),
        pytest.param(TWO_SLOTS, 60, id="two-slots"),
        pytest.param(LABELLED, 2000, id="labelled, further", marks=pytest.mark.slow),
        pytest.param(TWO_SLOTS, 2000, id="two-slots, further", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(3000)
def test_the_nearest_states_of_a_larger_instance_agree(instance, limit):
    found = explored(instance, limit)
    assert not found.disagreements, "\n".join(found.disagreements[:20])


# guards


INPUTS = ("scope", "backward_left", "reading.device", "reading.host", "memory_short", "no_optimizer")


def with_input(name: str, pair: Pair, world):
    """Facts and world, with one of the inputs true."""
    facts = pair.facts
    if name == "scope":
        return evolve(facts, scopes=(Scope(1, ACTOR, "ASLEEP"),)), world
    if name == "backward_left":
        world.things = evolve(world.things, grads=True)
        return evolve(facts, backward_seen=True), world
    if name.startswith("reading."):
        place = Copy.DEVICE if name == "reading.device" else Copy.HOST
        lease = Lease(0, facts.tags[ACTOR], {1: place}, "weights")
        return evolve(facts, leases=(*facts.leases, lease)), world
    if name == "memory_short":
        world.short = True
    if name == "no_optimizer":
        world.trained = False
    return facts, world


class Guards:
    """Compares guards, once per value of the bits that a guard reads."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep, self.compared, self.wrong = lockstep, set(), []
        bit = lockstep.alpha.bit
        self.askings = {
            flat: [
                (one, compiled(one.guard, lockstep.runner.index), sum(bit[name] for name in bits_of(one.guard)))
                for one in found
                if one.asked.event != "fault"  # nobody asks for it
            ]
            for flat, found in lockstep.asked.items()
        }

    def compare(self, node, pair: Pair) -> None:
        flat, bits = node
        for asking, guard, support in self.askings[self.lockstep.runner.flats[flat]]:
            key = (asking.text, asking.row.target, asking.row.row.when, bits & support)
            if key in self.compared or self._about_another_load(asking, pair):
                continue
            self.compared.add(key)
            for name in (None, *INPUTS):
                self._compare_with(name, asking, guard, bits, pair)

    def _about_another_load(self, asking: Asking, pair: Pair) -> bool:
        """finish_load is about the load that is open, whatever its tag."""
        load = pair.facts.load
        return asking.asked.event == "finish_load" and load is not None and load.tag != asking.asked.tag

    def _compare_with(self, name, asking: Asking, guard, bits: int, pair: Pair) -> None:
        lockstep = self.lockstep
        world = lockstep.world(pair, Choice())
        facts, world = (pair.facts, world) if name is None else with_input(name, pair, world)
        if name is not None and not (name == "memory_short" and not region_needs(facts, asking.row, world)):
            bits |= lockstep.alpha.bit[name]
        call = lockstep.call(asking, evolve(pair, facts=facts))
        if self._told_apart_by_number(asking, facts):
            return
        row = find_row(lockstep.program.table, asking.row.source, facts, call, world)
        taken = row is asking.row
        if taken and asking.asked.event == "finish_sync":  # a rotation was refused, or not, when the sync began
            taken = not holds(Fact.ROTATES_SHOWN, facts, call, asking.row, world)
        if taken != bool(guard(bits)):
            self.wrong.append(f"{asking.text}, {name}: the run time {'takes' if taken else 'refuses'} it")

    def _told_apart_by_number(self, asking: Asking, facts) -> bool:
        """Of a rotation to another version of equal parts the run time sees that it moves the tag, the checker not."""
        one = asking.asked.rotate
        if one is None:
            return False
        versions = [facts.versions[facts.tags[tag]] for tag in (one, asking.asked.of or ACTOR)]
        return versions[0].id != versions[1].id and versions[0].parts == versions[1].parts


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.timeout(3000)
def test_guards_say_the_same(instance):
    found = explored(instance)
    guards = Guards(found)
    for node, pair in found.pairs.items():
        if pair.things.hooks:
            guards.compare(node, pair)
    assert not guards.wrong, "\n".join(guards.wrong[:20])
    assert len(guards.compared) > 50


# the sides by themselves


def test_the_first_states_are_the_same():
    lockstep = explored(TWO_SLOTS, limit=60)
    (first, pair), *_ = lockstep.pairs.items()
    assert lockstep.alpha(pair) == first[1]
    assert all(place is Copy.DEVICE for place in sources(pair.facts, ACTOR).values())


def test_all_states_of_the_checker_are_reached_by_the_run_time():
    """Nothing that the search goes through is out of the run time's reach."""
    found = explored(SMALLEST)
    assert set(found.pairs) == set(explore(found.program).parents)
