"""A machine of one's own: one more state and effects that its owner performs, driven on real memory."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from enum import StrEnum

import pytest
import torch
from attrs import evolve
from evaluating import FILES, MACHINE, PAGE, EvalFact, HalfWay, make_evaluating
from scenarios import TOKENS, assert_equal_weights, engine, live_weights, make_actor, weights_of
from typer.testing import CliRunner

from lifecycle import EffectFailed, Faulted, TransitionRefused
from lifecycle.cli import app
from lifecycle.testing.injection import failing
from lifecycle.testing.observe import broken_contract
from states.actor import ACTOR
from states.extend import Insert, extended
from states.resources import Fact
from states.spec import SAME, Effect, Event, Guard, Match, Row

pytestmark = pytest.mark.usefixtures("few_objects")

ROOT = PAGE.parents[1]
JUDGE = EvalFact.JUDGE


def keeps_its_promise(actor, judge):
    """The state's contract holds, and the judge is there exactly where the state says so."""
    if actor.state.name == "FAULTED":
        return
    assert broken_contract(actor, actor._table.spec.state(actor.state.name)) == []
    assert judge.there == ("whole" if actor.state.name == "EVALUATING" else None)
    assert not actor.facts.own_doubted


# what the page shows


@pytest.fixture
def folder(tmp_path):
    """A new directory with the files of the page, and a way to run something there."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    def run(*command):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_page_drives_its_machine(folder):
    """The files of the page run from a new directory and print what their comments say."""
    told = folder("drive.py")
    assert told.startswith("begin_evaluation: RESIDENT → EVALUATING\n  load_judge\n")
    assert "begin_training refused in EVALUATING: there is no such transition. Allowed here: end_evaluation, " in told
    assert told.endswith("ASLEEP []\n")


def test_page_tests_its_machine(folder):
    """The stateful test of the page passes."""
    assert "1 passed" in folder("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_machine.py")


COMMANDS = [line[2:].split() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_page_commands(folder, command):
    """Each command of the page succeeds in the directory of the machine, and speaks of it."""
    assert command[0] == "lifecycle"
    name = command[2].partition(":")[0]
    assert {"my_machine": "evaluati", "three_pools": "three_pools", "begin_evaluation": "evaluati"}[name] in folder(
        "-m", *command
    ).lower()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["sleep", "--from", "resident"], 0, "copy_out_weights"),
        (["sleep", "--from", "Switched(REF)"], 0, "sleep: SWITCHED(ref)"),
        (["wake_up", "--from", "asleep", "--machine", "frozen"], 0, "resume_forward_regions"),
        (["begin_training", "--from", "resident", "--machine", "frozen"], 2, "unknown event"),
        (["sleep", "--from", "syncing_asleep", "--machine", "states.frozen:FROZEN"], 1, "refused in SYNCING"),
        (["sleep", "--from", "awake"], 2, "unknown state"),
        (["sleep", "--from", "resident", "--machine", "nowhere:MACHINE"], 2, "nowhere"),
    ],
)
def test_plan_command(arguments, status, told):
    """``lifecycle plan`` reads any machine, and states in any case."""
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})
    assert done.exit_code == status, done.output
    assert told in done.output


# declaring


class Clash(StrEnum):
    WEIGHTS = "weights of the judge"
    SAME_TEXT = "gradients present"


class Other(StrEnum):
    JUDGE = "another judge"


#: Both ways out of FAULTED have the judge unloaded.
INSERT = Insert("unload_judge", ("recover", "close"), after="close_open_business", source="FAULTED")


def _state(**changes):
    return evolve(MACHINE.state("EVALUATING"), **changes)


def _effects(**changes):
    return [evolve(MACHINE.effect("load_judge"), **changes), MACHINE.effect("unload_judge")]


def _rows(*without):
    return [row for row in MACHINE.rows if "EVALUATING" in (row.source, row.target) and row.event not in without]


def variant(**changes):
    """The page's machine, declared with something else."""
    parts = {
        "states": [MACHINE.state("EVALUATING")],
        "events": [event for event in MACHINE.events if event not in ACTOR.events],
        "effects": _effects(),
        "rows": _rows(),
        "insert": [INSERT],
        "lacking": {JUDGE: ["RESIDENT", "SWITCHED", "ASLEEP", "SYNCING", "CLOSED"]},
        "allow": {"forward": ["EVALUATING"], "weights": ["EVALUATING"], "state_dict": ["EVALUATING"]},
    }
    return extended(ACTOR, "variant", **{**parts, **changes})


WRONG = {
    "no fault": ({"rows": _rows("fault")}, "state EVALUATING has no row for 'fault'"),
    "no close": ({"rows": _rows("close")}, "state EVALUATING has no row for 'close'"),
    "recover says nothing": (
        {"insert": [Insert("unload_judge", ("close",), after="close_open_business")]},
        "row recover FAULTED -> RESIDENT: RESIDENT must lack JUDGE, which nothing here makes false",
    ),
    "judge is not loaded": (
        {"rows": [*_rows("begin_evaluation"), Row("begin_evaluation", "RESIDENT", "EVALUATING", (), ("no_phase",))]},
        "row begin_evaluation RESIDENT -> EVALUATING: EVALUATING must hold JUDGE",
    ),
    "shows nothing": ({"states": [_state(shows=None)]}, "EVALUATING holds VERSION_SHOWN but does not say which tag"),
    "shows in vain": (
        {"replace": [evolve(ACTOR.state("SWITCHED"), shows="ref")]},
        "state SWITCHED shows 'ref', though what it shows follows from its tag or origin",
    ),
    "inverse leaves it": (
        {"effects": [*_effects(inverse="agree")]},
        "effect load_judge gives JUDGE, which its inverse agree does not take",
    ),
    "inverse does not give it": (
        {"effects": [_effects()[0], evolve(_effects()[1], inverse="agree")]},
        "effect unload_judge takes JUDGE, which its inverse agree does not give",
    ),
    "name of a fact": ({"effects": _effects(needs=[Clash.WEIGHTS])}, "Clash.WEIGHTS has the name of Fact.WEIGHTS"),
    "text of a fact": ({"effects": _effects(needs=[Clash.WEIGHTS])}, "Clash.SAME_TEXT has the text of Fact.GRADS"),
    "text beside the fact": (
        {"effects": _effects(takes=[Fact.GRADS, Clash.SAME_TEXT])},
        "Clash.SAME_TEXT has the text of Fact.GRADS",
    ),
    "name of one's own": ({"effects": _effects(needs=[Other.JUDGE])}, "has the name of"),
    "bare text": ({"effects": _effects(needs=["judge loaded"])}, "fact 'judge loaded' is no member of a StrEnum"),
    "declared again": ({"events": [*MACHINE.events]}, "event 'sleep' is declared 2 times"),
    "replaces nothing": ({"replace": [Event("slep", "")]}, "machine 'actor' has no event 'slep'"),
    "replaces no row": (
        {"replace": [Row("sleep", "SYNCING", "ASLEEP")]},
        "machine 'actor' has no row sleep from SYNCING (none tag)",
    ),
    "inserts nowhere": (
        {"insert": [evolve(INSERT, events=("recover", "sleep"))]},
        "insert unload_judge: machine 'actor' has no such row of 'sleep'",
    ),
    "inserts twice": ({"insert": [evolve(INSERT, before="read_back")]}, "say before or after, not both"),
    "lacking nowhere": ({"lacking": {JUDGE: ["AWAY"]}}, "lacking: machine 'actor' has no state 'AWAY'"),
    "allows nothing": ({"allow": {"forwards": ["EVALUATING"]}}, "allow: machine 'actor' has no use 'forwards'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_extension(kind):
    """Each kind of wrong extension is refused when it is declared, and named."""
    changes, expected = WRONG[kind]
    with pytest.raises(ValueError, match="is declared wrongly") as error:
        variant(**changes)
    assert expected in str(error.value)


def test_own_facts():
    """A machine knows which facts are its own; the library's have none."""
    assert MACHINE.own_facts == (JUDGE,)
    assert ACTOR.own_facts == ()
    assert variant().own_facts == (JUDGE,)


def test_the_extended_machine_is_left_alone():
    """Extending makes a new value."""
    assert "EVALUATING" not in {state.name for state in ACTOR.states}
    assert (
        ACTOR.row("recover", "FAULTED", to="RESIDENT").effects
        != MACHINE.row("recover", "FAULTED", to="RESIDENT").effects
    )


def test_inserts_and_replacements():
    """Effects go where they are said to go, and items with the same name take each other's place."""
    bell = Effect("ring", "Make a sound.", harmless=True)
    machine = extended(
        ACTOR,
        "loud",
        effects=[bell],
        insert=[
            Insert("ring", ("sleep",), before="agree", source="RESIDENT"),
            Insert("ring", ("wake_up",), after="agree", target="SWITCHED"),
            Insert("ring", ("switch",)),
        ],
        replace=[Event("sleep", "Lie down."), evolve(ACTOR.row("adopt", "RESIDENT"), guards=("no_phase", "no_load"))],
    )
    effects = machine.row("sleep", "RESIDENT").effects
    assert effects[effects.index("agree") - 1] == "ring"
    assert "ring" not in machine.row("sleep", "SWITCHED").effects
    assert machine.row("wake_up", "ASLEEP", Match.OTHER).effects[1:3] == ("agree", "ring")
    assert all(row.effects[-1] == "ring" for row in machine.rows if row.event == "switch")
    assert machine.row("adopt", "RESIDENT").guards == ("no_phase", "no_load")
    assert [event.doc for event in machine.events if event.name == "sleep"] == ["Lie down."]
    assert [row.event for row in machine.rows] == [row.event for row in ACTOR.rows]


# attaching


def refused(machine=MACHINE, **perform):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="can not drive this actor") as error:
        make_actor(machine=machine, perform=perform)
    assert model.weight.numel()
    return str(error.value)


def _nothing(call):
    return None


def test_attaching_needs_a_handler_for_each_effect():
    """What has no handler, and handlers that have no effect, are named, all at once."""
    told = refused(load_jugde=_nothing, agree=_nothing)
    assert "effect load_judge has no handler: give perform={'load_judge': ...}" in told
    assert "effect unload_judge has no handler" in told
    assert "there is no effect 'load_jugde' for the handler given; own effects: load_judge, unload_judge" in told
    assert "effect agree is this library's: it takes no handler" in told
    assert "the handler of load_judge is 3" in refused(load_judge=3, unload_judge=_nothing)


def test_attaching_refuses_what_can_not_be_observed():
    """A guard over a fact that nobody can see when an event is asked for."""
    guard = Guard("quiet", "loud", "", forbids=[Fact.REST_VALID])
    told = refused(variant(guards=[guard]), load_judge=_nothing, unload_judge=_nothing)
    assert "guard quiet asks for REST_VALID, which can not be observed" in told


def test_attaching_refuses_mixed_facts():
    """One's own effects change one's own facts, the library's effects the library's."""
    mine = variant(effects=[evolve(_effects()[0], takes=[Fact.WORKSPACES]), _effects()[1]])
    assert "effect load_judge is your own: it can not give or take WORKSPACES" in refused(mine)
    adopting = ACTOR.effect("adopt_weights")
    theirs = variant(replace=[evolve(adopting, gives=[JUDGE, *adopting.gives])], insert=[], lacking={})
    assert "effect adopt_weights is this library's: it can not give or take JUDGE" in refused(theirs)


def test_attaching_refuses_a_machine_without_ends():
    """The controller itself fires fault and close."""
    rows = tuple(evolve(row, target="ASLEEP") for row in ACTOR.rows if row.event == "fault" and row.source == "ASLEEP")
    guards = ("no_phase", "no_load", "arrived", "optimizer_arrived")
    events = ("sleep", "wake_up", "arrive", "arrive_optimizer")
    spec = evolve(
        ACTOR,
        name="endless",
        refused=(),
        states=tuple(s for s in ACTOR.states if s.name in ("RESIDENT", "ASLEEP")),
        events=tuple(e for e in ACTOR.events if e.name in (*events, "fault")),
        rows=(
            *(r for r in ACTOR.rows if r.event in events and {r.source, r.target} <= {"RESIDENT", "ASLEEP", SAME}),
            *rows,
            Row("fault", "RESIDENT", "ASLEEP", ACTOR.row("sleep", "RESIDENT").effects, guards),
        ),
        uses=(),
        advice=(),
    )
    told = refused(spec)
    assert "it has no event 'close'" in told
    assert "row fault from RESIDENT leads to ASLEEP" in told


def test_a_state_that_shows_a_tag_needs_it():
    """A state may show another tag than 'actor', which then must be declared when the actor is attached."""
    machine = extended(ACTOR, "museum", replace=[evolve(ACTOR.state("RESIDENT"), shows="old_master")])
    with pytest.raises(ValueError, match="state RESIDENT of machine 'museum' shows the tag 'old_master'"):
        make_actor(machine=machine)


# driving


def test_round_trip():
    """There and back: the judge comes and goes, weights and training are what they were."""
    actor, model, optimizer, judge = make_evaluating()
    before = weights_of(actor)
    actor.fire("begin_evaluation")
    keeps_its_promise(actor, judge)
    assert actor.facts.own == {JUDGE}
    with torch.no_grad():
        model.eval()(TOKENS)
    assert_equal_weights(before, weights_of(actor))
    actor.fire("end_evaluation")
    keeps_its_promise(actor, judge)
    assert actor.facts.own == set()
    with actor.training():
        model.train()(TOKENS).square().mean().backward()
        optimizer.step()
    assert not torch.equal(weights_of(actor)["actor"]["body.weight"], before["actor"]["body.weight"])


def test_handlers_are_told_and_noted():
    """A handler learns what happens; the journal has what it moved, as for any effect."""
    actor, _, _, judge = make_evaluating()
    actor.fire("begin_evaluation")
    (call,) = judge.told
    assert (call.event, call.effect, call.tag, call.shown) == ("begin_evaluation", "load_judge", None, "actor")
    assert call.facts.tags == actor.tags
    record = next(record for record in actor.journal if record.effect == "load_judge")
    assert (record.kind, record.event, record.nbytes) == ("effect", "begin_evaluation", 40)
    assert actor.journal[-1].target == "EVALUATING"
    assert actor.journal[-1].version == actor.tags["actor"]


@pytest.mark.parametrize("event", [event.name for event in ACTOR.events if not event.internal])
def test_every_public_event_from_the_own_state(event):
    """From a state of one's own an event leads where its row says, or is refused and changes nothing."""
    actor, _, _, judge = make_evaluating()
    actor.fire("begin_evaluation")
    leads = {"sleep": "ASLEEP", "close": "CLOSED"}
    facts = actor.facts
    arguments = {"tag": "ref"} if event in ("wake_up", "switch", "load", "tag") else {}
    arguments |= {"of": "actor"} if event == "tag" else {}
    if event in leads:
        getattr(actor, event)()
        assert actor.state.name == leads[event]
        keeps_its_promise(actor, judge)
        return
    with pytest.raises(TransitionRefused) as error:
        actor._fire(event, **arguments)
    assert error.value.allowed == ("end_evaluation", "sleep", "close")
    assert actor.facts is facts
    keeps_its_promise(actor, judge)


def test_own_events_are_refused_and_offered_like_any():
    """Refusals name them; plans know them; guards stand before them."""
    actor, _, _, judge = make_evaluating()
    with pytest.raises(TransitionRefused, match=r"end_evaluation refused in RESIDENT: .*begin_evaluation"):
        actor.fire("end_evaluation")
    assert str(actor.plan("begin_evaluation")) == "begin_evaluation: RESIDENT → EVALUATING\n  load_judge"
    actor.begin_training()
    with pytest.raises(TransitionRefused, match="a training phase is open"):
        actor.fire("begin_evaluation")
    assert "a training phase is open" in str(actor.plan("begin_evaluation"))
    actor.abort_training()
    actor.sleep()
    assert "begin_evaluation refused in ASLEEP" in str(actor.plan("begin_evaluation"))
    assert judge.told == []


def test_plan_shows_bytes():
    """A plan reads as what leads where, and what each effect moves."""
    actor, *_ = make_evaluating()
    lines = str(actor.plan("sleep")).splitlines()
    assert lines[0] == "sleep: RESIDENT → ASLEEP"
    moved = sum(int(line.split()[1].replace(",", "")) for line in lines if line.endswith("bytes"))
    assert moved == actor.plan("sleep").nbytes > 0


def test_fire_by_name():
    """Public events by their names do what their methods do; all others are errors that name what there is."""
    actor, *_ = make_evaluating()
    actor.fire("sleep")
    actor.fire("wake_up", "ref")
    assert str(actor.state) == "SWITCHED(ref)"
    actor.fire("switch", "actor")
    for event, told in {
        "begin_evaluations": "there is no event 'begin_evaluations' to ask for; known: sleep, .*begin_evaluation",
        "fault": "there is no event 'fault'",
        "finish_load": "there is no event 'finish_load'",
        "load": r"use loading\(tag\), a block",
        "tag": r"use tag\(name, of\)",
        "sync": r"use sync\(engines\)",
    }.items():
        with pytest.raises(ValueError, match=told):
            actor.fire(event)
    actor.fire("close")
    assert actor.state.name == "CLOSED"


def test_operations_of_the_own_state():
    """What the state allows goes, what it does not is refused by the hooks."""
    actor, model, optimizer, _ = make_evaluating()
    actor.fire("begin_evaluation")
    output = model.eval()(TOKENS).sum()
    for operation, ask in (("backward", output.backward), ("step", optimizer.step)):
        with pytest.raises(TransitionRefused, match=f"{operation} refused in EVALUATING"):
            ask()
    saved = model.state_dict()
    assert torch.equal(saved["body.weight"], weights_of(actor)["actor"]["body.weight"])


def test_forward_where_the_state_forbids_it():
    """A state that allows no forward refuses it, though its weights are on the device; leaving allows it again."""
    actor, model, _, _ = make_evaluating(variant(allow={"weights": ["EVALUATING"]}))
    actor.fire("begin_evaluation")
    with pytest.raises(TransitionRefused, match="forward refused in EVALUATING"):
        model(TOKENS)
    actor.fire("end_evaluation")
    model(TOKENS)


def test_scopes():
    """A scope that finds its tag shown moves nothing; leaving one goes back to sleep by the own state's row."""
    actor, _, _, judge = make_evaluating()
    actor.fire("begin_evaluation")
    with actor.hold():
        assert actor.state.name == "EVALUATING"
    with pytest.raises(TransitionRefused, match="switch"), actor.using("ref"):
        pass
    actor.sleep()
    live = weights_of(actor)
    with actor.hold():
        actor.fire("begin_evaluation")
        keeps_its_promise(actor, judge)
    assert actor.state.name == "ASLEEP"
    keeps_its_promise(actor, judge)
    assert_equal_weights(live, weights_of(actor))


def test_sync_from_the_own_state():
    """A sync begins in it and comes back to it, with the judge still there."""
    start = evolve(ACTOR.row("start_sync", "RESIDENT"), source="EVALUATING")
    closing = Insert("unload_judge", ("close",), before="bring_back", source="SYNCING")
    machine = variant(
        rows=[*_rows(), start],
        insert=[INSERT, closing],
        lacking={JUDGE: ["RESIDENT", "SWITCHED", "ASLEEP", "CLOSED"]},
    )
    actor, _, _, judge = make_evaluating(machine, host="shared")
    actor.fire("begin_evaluation")
    assert actor.sync(engine()).outcomes == {"fake": "updated"}
    assert actor.state.name == "EVALUATING"
    keeps_its_promise(actor, judge)
    with pytest.raises(ValueError, match="CLOSED must lack JUDGE"):
        variant(rows=[*_rows(), start], insert=[INSERT], lacking={JUDGE: ["RESIDENT", "SWITCHED", "ASLEEP", "CLOSED"]})


def test_a_per_tag_state():
    """A state of one's own per tag: the device holds that tag's weights, and the handler is told which."""
    other = ACTOR.row("wake_up", "ASLEEP", Match.OTHER)
    switched = ACTOR.state("SWITCHED")
    machine = extended(
        ACTOR,
        "scoring",
        states=[evolve(switched, name="SCORING", doc="A tag's version is scored.")],
        events=[Event("begin_scoring", "Wake a tag up to be scored.")],
        effects=[Effect("open_log", "Open the tag's log.", harmless=True)],
        rows=[
            Row("begin_scoring", "ASLEEP", "SCORING", (*other.effects, "open_log"), other.guards, Match.OTHER),
            *(evolve(ACTOR.row(event, "SWITCHED"), source="SCORING") for event in ("arrive", "sleep", "close")),
            Row("fault", "SCORING", "FAULTED"),
        ],
        allow={"forward": ["SCORING"], "weights": ["SCORING"]},
    )
    logs = []
    actor, _, _, _ = make_evaluating(_with_judge(machine), perform={"open_log": lambda call: logs.append(call.tag)})
    actor.sleep()
    expected = weights_of(actor)["ref"]
    actor.fire("begin_scoring", "ref")
    assert str(actor.state) == "SCORING(ref)"
    assert logs == ["ref"]
    live = live_weights(actor)
    assert all(torch.equal(live[name], tensor) for name, tensor in expected.items() if name in live)
    assert broken_contract(actor, machine.state("SCORING")) == []
    with pytest.raises(TransitionRefused):
        actor.fire("begin_scoring")
    actor.sleep()
    assert actor.state.name == "ASLEEP"


def _with_judge(machine):
    """The judge's effects too, so that ``make_evaluating`` has something to give its handlers to."""
    return extended(machine, machine.name, effects=_effects())


# failing

CASES = [
    pytest.param(row, effect, id=f"{row.event}-{row.source}-{row.target}-{effect}")
    for row in MACHINE.rows
    if {"load_judge", "unload_judge"} & set(row.effects)
    for effect in row.effects
    if effect not in ("agree", "abandon_sync", "lower_sync_groups")
]


def _bring(actor, row):
    if row.source in ("EVALUATING", "FAULTED"):
        actor.fire("begin_evaluation")
    if row.source == "FAULTED":
        when = "after" if row.target == "ASLEEP" else "before"
        with failing(actor, "pause_regions", when), pytest.raises(EffectFailed):
            actor.sleep()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("row", "effect"), CASES)
def test_effect_fails(row, effect, when):
    """Undone, the judge is where the state says; else FAULTED, and recover() makes sure. No tag loses a bit."""
    actor, _, _, judge = make_evaluating()
    before = weights_of(actor)
    _bring(actor, row)
    source = actor.state.name
    with failing(actor, effect, when) as watch, suppress(EffectFailed, Faulted):
        actor._fire(row.event)
    if not watch.failed:  # it had nothing to do here
        assert effect not in ("load_judge", "unload_judge") or source == "FAULTED"
        return
    assert actor.state.name in (source, "FAULTED")
    keeps_its_promise(actor, judge)
    if actor.state.name == "FAULTED":
        if row.event == "close":
            actor.close()
            assert judge.there is None
            return
        actor.recover()
        keeps_its_promise(actor, judge)
    assert_equal_weights(before, weights_of(actor))


@pytest.mark.parametrize(("event", "effect"), [("begin_evaluation", "load_judge"), ("end_evaluation", "unload_judge")])
@pytest.mark.parametrize("inverse_too", [False, True])
def test_handler_stops_half_way(event, effect, inverse_too):
    """Its inverse is performed, though the fact had not changed yet; where that fails too, recover() cleans up."""
    actor, _, _, judge = make_evaluating()
    before = weights_of(actor)
    if event == "end_evaluation":
        actor.fire("begin_evaluation")
    source = actor.state.name
    judge.stop = {"load_judge", "unload_judge"} if inverse_too else {effect}
    with pytest.raises(EffectFailed) as error:
        actor.fire(event)
    judge.stop = set()
    assert isinstance(error.value.__cause__, HalfWay)
    assert error.value.rolled_back is not inverse_too
    assert actor.state.name == ("FAULTED" if inverse_too else source)
    if inverse_too:
        assert judge.there == "half"
        assert actor.facts.own_doubted == {JUDGE}
        with pytest.raises(Faulted):
            actor.fire("begin_evaluation")
        actor.recover()
        assert actor.state.name == "RESIDENT"
    keeps_its_promise(actor, judge)
    assert_equal_weights(before, weights_of(actor))


def test_a_point_of_no_return_of_ones_own():
    """Without an inverse its failure is a fault, with the intent in the journal; close() cleans up as well."""
    machine = variant(effects=_effects(inverse=None))
    actor, model, _, judge = make_evaluating(machine)
    live = live_weights(actor)
    judge.stop = {"load_judge"}
    with pytest.raises(EffectFailed, match="load_judge"):
        actor.fire("begin_evaluation")
    judge.stop = set()
    assert str(actor.state) == "FAULTED(load_judge)"
    assert [r.effect for r in actor.journal if r.kind == "intent" and r.event == "begin_evaluation"] == ["load_judge"]
    actor.close()
    assert judge.there is None
    assert torch.equal(model.body.weight, live["body.weight"])


def test_a_handler_that_is_interrupted():
    """Ctrl-C inside a handler undoes the event and arrives."""
    actor, _, _, judge = make_evaluating()

    def interrupted(call):
        judge.there = "half"
        raise KeyboardInterrupt

    actor._world.handlers["load_judge"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        actor.fire("begin_evaluation")
    assert actor.state.name == "RESIDENT"
    keeps_its_promise(actor, judge)


def test_a_handler_may_not_ask_for_events():
    """An event from inside an event is refused, and undoes it."""
    actor, _, _, judge = make_evaluating()
    asked = []

    def greedy(call):
        asked.append(actor.moving)
        actor.sleep()

    actor._world.handlers["load_judge"] = greedy
    with pytest.raises(TransitionRefused, match="asked from inside"):
        actor.fire("begin_evaluation")
    assert asked == [("begin_evaluation", "load_judge")]
    keeps_its_promise(actor, judge)


def test_a_handler_that_returns_nonsense():
    """What is neither bytes nor None is the handler's failure, undone like any."""
    actor, _, _, judge = make_evaluating()
    actor._world.handlers["load_judge"] = lambda call: "loaded"
    with pytest.raises(EffectFailed, match="the handler of load_judge returned 'loaded'"):
        actor.fire("begin_evaluation")
    keeps_its_promise(actor, judge)


# facts of one's own


class Bell(StrEnum):
    WOUND = "bell wound up"


def _bell(initially=False):
    """A bell that is wound up once and rings as often as asked; how it is wound changes nothing until it is done."""
    states = [evolve(ACTOR.state("RESIDENT"), holds=ACTOR.state("RESIDENT").holds | {Bell.WOUND})] if initially else []
    rows = [
        Row("wind", "RESIDENT", "<same>", ("wind_up",)),
        Row("ring", "RESIDENT", "<same>", ("sound",), ("wound",)),
        Row("check_bell", "RESIDENT", "<same>", ("sound",), when=[Bell.WOUND]),
    ]
    if not initially:
        rows.append(Row("check_bell", "RESIDENT", "<same>", unless=[Bell.WOUND]))
    insert = [Insert("wind_up", (event,), target="RESIDENT") for event in ("wake_up", "switch", "recover")]
    return extended(
        ACTOR,
        "bell",
        events=[Event(name, name) for name in ("wind", "ring", "check_bell")],
        effects=[
            Effect("wind_up", "Wind it up.", gives=[Bell.WOUND], harmless=True),
            Effect("sound", "Ring it.", harmless=True),
        ],
        guards=[Guard("wound", "the bell has run down", "fire('wind') first.", requires=[Bell.WOUND])],
        rows=rows,
        insert=insert if initially else (),
        replace=states,
    )


def _drive_bell(machine):
    done = []
    perform = {name: lambda call: done.append(call.effect) for name in ("wind_up", "sound")}
    actor, _, _ = make_actor(machine=machine, perform=perform)
    return actor, done


def test_guards_and_conditions_read_own_facts():
    """A guard and ``when`` see what the effects left; an effect whose facts are as it leaves them is not run again."""
    actor, done = _drive_bell(_bell())
    with pytest.raises(TransitionRefused, match=r"the bell has run down.*fire\('wind'\) first"):
        actor.fire("ring")
    assert actor.plan("check_bell").effects == ()
    actor.fire("wind")
    actor.fire("wind")
    assert done == ["wind_up"]
    actor.fire("ring")
    actor.fire("ring")  # gives and takes nothing of its own: always
    actor.fire("check_bell")
    assert done == ["wind_up", "sound", "sound", "sound"]


def test_the_initial_state_makes_its_facts_true():
    """What the initial state holds is true when the actor is attached, and stays so through a round trip."""
    actor, done = _drive_bell(_bell(initially=True))
    assert actor.facts.own == {Bell.WOUND}
    actor.sleep()
    actor.wake_up()
    assert done == []
    assert broken_contract(actor, actor._table.spec.state("RESIDENT")) == []


def test_a_harmless_effect_that_fails_leaves_its_facts():
    """Nothing is in doubt after it."""
    actor, done = _drive_bell(_bell())
    with failing(actor, "wind_up", "after"), pytest.raises(EffectFailed) as error:
        actor.fire("wind")
    assert error.value.rolled_back
    assert (actor.facts.own, actor.facts.own_doubted) == (set(), set())
    actor.fire("wind")
    assert done == ["wind_up", "wind_up"]
