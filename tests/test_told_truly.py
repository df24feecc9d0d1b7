"""What the facts say of a sync, of a close and of a recovery is so, also where something came in between."""

from __future__ import annotations

import pytest
from attrs import evolve

from lifecycle.actions import Action, Call
from lifecycle.outcome import Settings, after, during
from lifecycle.versions import ACTOR, Part, first_facts, holding, leased, move_tag, open_load, sources
from lifecycle.work import WORK
from states.resources import Copy, Region, Slot

SETTINGS = Settings({})


def attached(**changes):
    """Two tags of one version; every part has a copy."""
    parts = [Part(n, slot, 8, f"{n:016x}", {"t": f"{n:016x}"}) for n, slot in enumerate(Slot, start=1)]
    facts = first_facts(parts, ["ref"], [Region.WEIGHTS, Region.OPTIMIZER, Region.REST], True, Copy.HOST)
    return evolve(facts, copies={part.id: Copy.HOST for part in parts}, **changes)


def with_other_version(facts):
    """'ref' points at a version of its own, which the device does not hold."""
    before = facts
    facts = open_load(facts, "ref", {})
    version = facts.load.version
    copies = {**facts.copies, **dict.fromkeys(facts.versions[version].parts.values(), Copy.HOST)}
    facts = evolve(facts, load=None, device=before.device, copies=copies)
    return move_tag(facts, "ref", version)


@pytest.mark.parametrize("act", ["engine_end", "publish"])
def test_a_tag_that_moves_during_a_sync_does_not_change_what_was_sent(act):
    facts = with_other_version(attached())
    sent = facts.tags["ref"]
    facts = leased(facts, sent, sources(facts, "ref"), "sync")[0]
    moved = move_tag(facts, "ref", facts.tags[ACTOR])
    call = Call("finish_sync", moved, tag="ref", engines=("a",))
    found = after(moved, Action(act, engine="a"), None, call, SETTINGS)
    assert (found.engines.get("a") if act == "engine_end" else found.published) == sent


def test_the_bytes_of_a_sync_are_those_of_the_leased_version():
    facts = with_other_version(attached())
    facts = leased(facts, facts.tags[ACTOR], sources(facts, ACTOR), "sync")[0]
    call = Call("finish_sync", facts, tag="ref", engines=("a",))  # whose parts have no bytes yet
    (send,) = WORK["send_weights"](facts, call, None)
    assert send.nbytes == 3 * 8


def test_a_close_that_stops_half_way_claims_nothing_that_it_may_have_written_over():
    facts = with_other_version(attached())
    refs = facts.version_of("ref").parts[Slot.TRAINED]
    facts = holding(facts, Slot.TRAINED, refs)
    found = during(facts, Action("bring_back"))
    assert Slot.TRAINED not in found.device
    assert found.device[Slot.FROZEN] == facts.version_of(ACTOR).parts[Slot.FROZEN]


def test_bytes_that_are_not_the_current_content_are_no_backup_of_it():
    """After a fault memory may hold anything; the copy is what the optimizer state is."""
    facts = attached()
    facts, wrong = evolve(facts, parts={**facts.parts, 99: Part(99, Slot.OPTIMIZER, 8, "f" * 16, {})}), 99
    facts = holding(facts, Slot.OPTIMIZER, wrong)

    class Probe:
        def nbytes(self, slot):
            return 8

    for effect in ("back_up_regions", "copy_out_everything"):
        if effect in WORK:
            todo = list(WORK[effect](facts, Call("recover", facts), Probe()))
            assert [action.slot for action in todo if action.do == "back_up"] == [Slot.REST]
