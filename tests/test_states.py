"""The declaration: what is found wrong in one, and what the actor's expands to."""

from __future__ import annotations

import pytest
from attrs import evolve

from lifecycle.machine import RunningMachine
from lifecycle.plan import Table
from states.actor import ACTOR
from states.resources import Fact, Slot
from states.spec import (
    ORIGIN,
    SAME,
    Advice,
    DefinitionError,
    Effect,
    Event,
    Guard,
    MachineSpec,
    Match,
    Row,
    State,
    Use,
    flat_rows,
    flat_states,
)

TAGS = ("actor", "ref", "old_actor")


def small(**changes):
    """A machine of two states that is right, with some of it changed."""
    parts = {
        "name": "lamp",
        "initial": "OFF",
        "states": (
            State("OFF", "dark", lacks=[Fact.WEIGHTS]),
            State("ON", "bright", holds=[Fact.WEIGHTS]),
            State("BROKEN", "gone", final=True),
        ),
        "events": (Event("on", ""), Event("off", ""), Event("drop", "")),
        "effects": (
            Effect("agree", "", harmless=True),
            Effect("light", "", gives=[Fact.WEIGHTS], inverse="darken"),
            Effect("darken", "", needs=[Fact.WEIGHTS], takes=[Fact.WEIGHTS]),
        ),
        "guards": (Guard("calm", "", "", forbids=[Fact.SCOPE_OPEN]),),
        "rows": (
            Row("on", "OFF", "ON", ("light",), ("calm",)),
            Row("off", "ON", "OFF", ("darken",)),
            Row("drop", "OFF", "BROKEN"),
        ),
    }
    return MachineSpec(**{**parts, **changes})


def found(**changes) -> str:
    with pytest.raises(DefinitionError) as error:
        small(**changes)
    assert len(error.value.problems) == str(error.value).count("\n")
    return "\n".join(error.value.problems)


def test_a_right_machine_builds():
    """The machine that the tests below make wrong is right."""
    assert small().state("ON").holds == {Fact.WEIGHTS}


ROWS = small().rows
WRONG = {
    "unknown target": ({"rows": (*ROWS, Row("off", "OFF", "AWAY"))}, "unknown target 'AWAY'"),
    "unknown source": ({"rows": (*ROWS, Row("off", "AWAY", "ON"))}, "unknown source 'AWAY'"),
    "unknown event": ({"rows": (*ROWS, Row("of", "ON", "OFF"))}, "unknown event 'of'"),
    "misspelt effect": ({"rows": (Row("on", "OFF", "ON", ("lihgt",)), *ROWS[1:])}, "unknown effect 'lihgt'"),
    "misspelt guard": ({"rows": (Row("on", "OFF", "ON", ("light",), ("clam",)), *ROWS[1:])}, "unknown guard 'clam'"),
    "unknown initial": ({"initial": "DIM"}, "initial state 'DIM'"),
    "unknown inverse": (
        {"effects": (*small().effects, Effect("blink", "", inverse="unblink"))},
        "effect blink: unknown inverse 'unblink'",
    ),
    "unknown use": ({"uses": (Use("look", ("DIM",), "", ""),)}, "use look: unknown state 'DIM'"),
    "unknown advice": ({"advice": (Advice("dim", "ON", ""),)}, "advice on dim: unknown event 'dim'"),
    "duplicate row": ({"rows": (*ROWS, ROWS[0])}, "row on from OFF (none tag) is declared 2 times"),
    "duplicate state": ({"states": (*small().states, State("ON", "again"))}, "state 'ON' is declared 2 times"),
    "duplicate effect": ({"effects": (*small().effects, Effect("agree", ""))}, "effect 'agree' is declared 2 times"),
    "effect twice in one row": (
        {"rows": (Row("on", "OFF", "ON", ("light", "light")), *ROWS[1:])},
        "effect light stands 2 times",
    ),
    "unreachable state": (
        {"states": (*small().states, State("DIM", "")), "rows": (*ROWS, Row("off", "DIM", "OFF"))},
        "state DIM can not be reached from OFF",
    ),
    "trapped state": (
        {"states": (*small().states, State("STUCK", "")), "rows": (*ROWS, Row("drop", "ON", "STUCK"))},
        "state STUCK leads neither to OFF nor to a final state",
    ),
    "leaving a final state": ({"rows": (*ROWS, Row("on", "BROKEN", "OFF"))}, "leaves a final state"),
    "target does not follow": (
        {"rows": (Row("on", "OFF", "ON"), *ROWS[1:])},
        "row on OFF -> ON: ON must hold WEIGHTS",
    ),
    "target must lack": (
        {"rows": (*ROWS[:1], Row("off", "ON", "OFF"), ROWS[2])},
        "row off ON -> OFF: OFF must lack WEIGHTS",
    ),
    "needs unmet": (
        {"rows": (*ROWS[:2], Row("drop", "OFF", "BROKEN", ("darken",)))},
        "effect darken needs WEIGHTS",
    ),
    "forbidden fact": (
        {
            "effects": (*small().effects, Effect("wash", "", forbids=[Fact.WEIGHTS])),
            "rows": (*ROWS[:1], Row("off", "ON", "OFF", ("wash", "darken")), ROWS[2]),
        },
        "effect wash forbids WEIGHTS",
    ),
    "irreversible before agree": (
        {"rows": (*ROWS[:1], Row("off", "ON", "OFF", ("darken", "agree")), ROWS[2])},
        "darken can not be undone, so it must come after agree",
    ),
    "contradicting state": (
        {"states": (*small().states[:2], State("BROKEN", "", [Fact.REST], [Fact.REST], final=True))},
        "state BROKEN both holds and lacks REST",
    ),
    "state over a condition": (
        {"states": (*small().states[:2], State("BROKEN", "", [Fact.SCOPE_OPEN], final=True))},
        "state BROKEN is declared over SCOPE_OPEN",
    ),
    "contradicting effect": (
        {"effects": (*small().effects, Effect("x", "", gives=[Fact.REST], takes=[Fact.REST]))},
        "effect x contradicts itself about REST",
    ),
    "effect over a condition": (
        {"effects": (*small().effects, Effect("x", "", needs=[Fact.SCOPE_OPEN]))},
        "effect x is declared over SCOPE_OPEN",
    ),
    "unknown first event": (
        {"guards": (*small().guards, Guard("slow", "", "", forbids=[Fact.REST], first="wait"))},
        "guard slow: unknown first event 'wait'",
    ),
    "origin of nothing": ({"rows": (*ROWS, Row("drop", "ON", ORIGIN))}, "ON does not remember an origin"),
    "tag state without a tag": (
        {
            "states": (*small().states, State("TAGGED", "", per_tag=True)),
            "rows": (*ROWS, Row("drop", "ON", "TAGGED"), Row("off", "TAGGED", "OFF", ("agree",))),
        },
        "TAGGED needs a tag other than 'actor'",
    ),
}


CALM = small().guard("calm")
COOL_OFF = Row("off", "ON", "OFF", ("darken",), ("cold",))
WAIT = Row("wait", "ON", SAME, ("cool",))


def waiting(*rows, **changes):
    """The lamp with these rows beside "on", and with a guard that asks for "wait" first."""
    return {
        "states": (State("OFF", "dark", lacks=[Fact.WEIGHTS, Fact.REST]), *small().states[1:]),
        "events": (*small().events, Event("wait", "", internal=True, takes=[Fact.REST])),
        "effects": (*small().effects, Effect("cool", "", takes=[Fact.REST], harmless=True)),
        "guards": (CALM, Guard("cold", "", "", forbids=[Fact.REST], first="wait")),
        "rows": (ROWS[0], *rows),
        **changes,
    }


WRONG |= {
    "asks first for what is not there": (
        waiting(COOL_OFF, ROWS[2]),
        "row off ON -> OFF: guard cold asks for wait first, which ON has no row for",
    ),
    "asks first for what does not help": (
        waiting(COOL_OFF, ROWS[2], WAIT, events=(*small().events, Event("wait", "", internal=True))),
        "guard cold asks for wait first, which does not promise that REST ends",
    ),
    "asks first for what does not bring it": (
        waiting(COOL_OFF, ROWS[2], WAIT, guards=(Guard("cold", "", "", [Fact.GROUPS], [Fact.REST], "wait"), CALM)),
        "guard cold asks for wait first, which does not promise GROUPS",
    ),
}


def test_a_guard_may_ask_for_something_first():
    """Where there is a row for it, and also where the contract of the state says that there is nothing to wait for."""
    drop = Row("drop", "OFF", "BROKEN", (), ("cold",))  # OFF lacks what "cold" forbids

    assert small(**waiting(COOL_OFF, drop, WAIT)).guard("cold").first == "wait"


@pytest.mark.parametrize("kind", WRONG)
def test_definition_error(kind):
    """Each kind of wrong declaration is refused when the machine is built, and named."""
    changes, expected = WRONG[kind]

    assert expected in found(**changes)


def test_all_findings_are_listed():
    """One build reports every finding of a stage, not the first."""
    rows = (Row("on", "OFF", "AWAY", ("lihgt",)), Row("of", "ON", "OFF"))

    assert all(word in found(rows=rows) for word in ("AWAY", "lihgt", "'of'"))


def _without(rows, number, name):
    row = rows[number]
    return (*rows[:number], evolve(row, effects=tuple(e for e in row.effects if e != name)), *rows[number + 1 :])


#: Removing one of these from the actor's table must not build: the contract would not hold.
LOAD_BEARING = [
    ("sleep", "RESIDENT", "copy_out_weights"),
    ("sleep", "RESIDENT", "back_up_regions"),
    ("sleep", "RESIDENT", "verify_weights"),
    ("sleep", "RESIDENT", "drop_workspaces"),
    ("sleep", "RESIDENT", "discard_grads"),
    ("sleep", "SWITCHED", "suspend_groups"),
    ("sleep", "SWITCHED", "pause_regions"),
    ("wake_up", "ASLEEP", "restore_weights"),
    ("wake_up", "ASLEEP", "restore_rest"),
    ("wake_up", "ASLEEP", "reload_groups"),
    ("switch", "SWITCHED", "copy_out_weights"),
    ("start_sync", "ASLEEP", "lease_source"),
    ("finish_sync", "SYNCING", "release_source"),
    ("finish_sync", "SYNCING", "lower_sync_groups"),
    ("fail_sync", "SYNCING", "lower_sync_groups"),
    ("end_training", "RESIDENT", "check_structure"),
    ("recover", "FAULTED", "close_open_business"),
    ("recover", "FAULTED", "resume_actor_regions"),
]


@pytest.mark.parametrize(("event", "source", "effect"), LOAD_BEARING)
def test_removing_an_effect_breaks_the_contract(event, source, effect):
    """The actor's table does not build without an effect that its contracts rest on."""
    numbers = [n for n, r in enumerate(ACTOR.rows) if (r.event, r.source) == (event, source) and effect in r.effects]
    assert numbers
    for number in numbers:
        with pytest.raises(DefinitionError):
            evolve(ACTOR, rows=_without(ACTOR.rows, number, effect))


def test_flat_states():
    """SWITCHED is expanded per tag, SYNCING per state that a sync starts from."""
    assert list(flat_states(ACTOR, TAGS)) == [
        "RESIDENT",
        "SWITCHED_ref",
        "SWITCHED_old_actor",
        "ASLEEP",
        "FAULTED",
        "CLOSED",
        "SYNCING_RESIDENT",
        "SYNCING_SWITCHED_ref",
        "SYNCING_SWITCHED_old_actor",
        "SYNCING_ASLEEP",
    ]


def test_generated_machine_equals_the_table_row_by_row():
    """Every transition of the running machine is a row of the table, and every row a transition."""
    table = Table.of(ACTOR, TAGS)
    machine = RunningMachine(table).transitions

    generated = {
        (event.name, transition.source, transition.dest)
        for event in machine.events.values()
        for transitions in event.transitions.values()
        for transition in transitions
    }

    assert generated == {(row.trigger, row.source, row.target) for row in flat_rows(ACTOR, TAGS)}
    assert set(machine.states) == set(table.states)
    assert machine.initial == ACTOR.initial
    assert not machine.auto_transitions
    assert machine.get_triggers("CLOSED") == ["close"]


def test_no_trigger_is_ambiguous():
    """From one state a trigger leads to one target, so the running machine never has to choose."""
    rows = {(row.trigger, row.source) for row in flat_rows(ACTOR, TAGS)}
    assert len(rows) == len({(r.trigger, r.source, r.target) for r in flat_rows(ACTOR, TAGS)})


def test_a_bare_trigger_changes_nothing():
    """Triggering the transitions machine around the controller is refused: no effect would run."""
    machine = RunningMachine(Table.of(ACTOR, TAGS))

    with pytest.raises(RuntimeError, match="through ActorLifecycle"):
        machine.transitions.model.sleep()

    assert machine.state == "RESIDENT"


def test_every_effect_and_guard_is_used():
    """The catalogue holds nothing that no row, and no inverse, names."""
    used = {name for row in ACTOR.rows for name in row.effects} | {e.inverse for e in ACTOR.effects}
    assert {effect.name for effect in ACTOR.effects} <= used
    assert {guard.name for guard in ACTOR.guards} == {name for row in ACTOR.rows for name in row.guards}


def test_slots_and_match_are_closed_vocabularies():
    """The words that rows and parts are told apart by."""
    assert [slot.value for slot in Slot] == ["frozen", "trained", "state", "optimizer", "rest"]
    assert {row.match for row in ACTOR.rows} == set(Match)
    assert any(row.target == SAME for row in ACTOR.rows)
