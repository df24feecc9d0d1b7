"""The search: what it takes over, and what it leaves out by symmetry, loses no state."""

from __future__ import annotations

import pytest
from attrs import evolve

from lifecycle.checker.explore import explore
from lifecycle.checker.formula import FALSE
from lifecycle.checker.ground import Model, ground
from lifecycle.checker.meaning import MEANINGS
from lifecycle.checker.reduce import symmetry, without_labels
from lifecycle.checker.report import check
from lifecycle.checker.steps import Invariant
from lifecycle.checker.words import Instance
from states.actor import ACTOR

NONE = Instance(tags=(), slots=("trained",), labels=())
ONE = Instance(tags=("ref",), slots=("trained",), labels=())
TWO = Instance(tags=("ref", "old_actor"), slots=("trained",), labels=())


@pytest.mark.parametrize("instance", [NONE, evolve(NONE, slots=("frozen", "trained")), evolve(NONE, labels=("actor",))])
def test_what_is_taken_over_loses_no_state(instance):
    program = ground(Model(instance=instance))
    kept, again = explore(program, keep=True), explore(program, keep=False)
    assert kept.parents.keys() == again.parents.keys()
    assert kept.moves == again.moves
    assert kept.steps < again.steps
    assert not kept.broken
    assert not again.broken


def test_no_state_is_reached_in_fewer_moves_than_it_was_found_in():
    found = explore(ground(Model(instance=NONE)))
    order = {node: n for n, node in enumerate(found.parents)}
    parents = [(order[node], order[parent]) for node, parent in found.parents.items() if parent is not None]
    assert [parent for _, parent in parents] == sorted(parent for _, parent in parents)
    assert all(parent < node for node, parent in parents)


def test_a_limit_is_told():
    found = explore(ground(Model(instance=ONE)), limit=100)
    assert not found.complete
    assert 100 < len(found.parents) < 3000


# symmetry


def _images(instance: Instance, limit: int | None = None) -> tuple[set, set]:
    program = ground(Model(instance=instance))
    canonical = symmetry(program)
    every = explore(program)
    assert not every.broken
    return {canonical(node) for node in every.parents}, set(explore(program, canonical).parents)


def test_engines_are_reduced_to_one_image_of_each_state():
    images, reduced = _images(evolve(NONE, engines=("a", "b")))
    assert images == reduced


def test_tags_are_reduced_to_one_image_of_each_state():
    images, reduced = _images(TWO)
    assert images == reduced


def test_an_image_stands_for_itself_and_for_its_renaming():
    program = ground(Model(instance=TWO))
    canonical = symmetry(program)
    for node in explore(program, limit=2000).parents:
        image = canonical(node)
        assert image <= node
        assert canonical(image) == image


def test_a_machine_that_treats_two_tags_differently_is_not_reduced():
    program = ground(Model(instance=TWO))
    symmetry(program)
    moves = tuple(
        evolve(move, guard=FALSE) if (move.event, move.tag) == ("switch", "ref") else move for move in program.moves
    )
    with pytest.raises(ValueError, match="does not treat ref and old_actor alike"):
        symmetry(evolve(program, moves=moves))


def test_engines_that_are_treated_differently_are_not_reduced():
    program = ground(Model(instance=evolve(NONE, engines=("a", "b"))))
    moves = tuple(move for move in program.moves if move.event != "engine a dies")
    with pytest.raises(ValueError, match="does not treat a and b alike"):
        symmetry(evolve(program, moves=moves))


def test_with_nothing_to_exchange_every_state_stands_for_itself():
    program = ground(Model(instance=NONE))
    canonical = symmetry(program)
    first = next(iter(explore(program, limit=10).parents))
    assert canonical(first) == first


def test_without_labels_the_same_states_are_reached():
    """Struck out of every state, the labels leave exactly the states that are reached without them."""
    labelled = explore(ground(Model(instance=evolve(ONE, labels=("actor",)))))
    bare = explore(ground(without_labels(Model(instance=evolve(ONE, labels=("actor",))))))

    def facts(found):
        names = found.runner.program.bits
        kept = [
            n for n, name in enumerate(names) if "published" not in name.split(".") and "has" not in name.split(".")
        ]
        told = [(n, names[n]) for n in kept]
        return {(flat, frozenset(name for n, name in told if bits >> n & 1)) for flat, bits in found.parents}

    assert facts(labelled) == facts(bare)
    assert len(bare.parents) < len(labelled.parents)


def test_a_meaning_that_names_a_tag_is_not_reduced():
    """Also where it stands in an inverse alone, and tells tags apart by what it does not do."""

    def restore_shown(asked):
        return () if asked.shown == "ref" else MEANINGS["restore_shown"](asked)

    told = Model(ACTOR, TWO, {"restore_shown": restore_shown})
    with pytest.raises(ValueError, match="ref and old_actor"):
        check(told, reduce=True)
    assert check(told).findings


def test_an_invariant_that_names_a_tag_is_not_reduced():
    named = Invariant("of_one", "", lambda w: w("hooks"), lambda w: w.readable("ref") | w("given_up"))
    with pytest.raises(ValueError, match="of_one"):
        check(Model(ACTOR, TWO, invariants=(named,)), reduce=True)


def test_a_meaning_of_no_effect_is_refused():
    """A misspelt name must not prove the machine as it was."""
    with pytest.raises(ValueError, match="nosuch"):
        ground(Model(ACTOR, NONE, {"nosuch": lambda asked: ()}))


@pytest.mark.parametrize("tags", [("actor",), ("a", "a"), ("1x",), ("base",), ("lent",), ("was",)])
def test_names_are_distinct_and_none_of_ours(tags):
    with pytest.raises(ValueError, match="distinct identifiers"):
        Instance(tags=tags)
