"""The engine's table: what it allows in every state, and that ``EngineState`` does that and nothing else."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import chain, combinations

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lifecycle.errors import EngineError
from lifecycle.rollout.facts import facts_told
from lifecycle.rollout.state import EngineState
from lifecycle.testing.engine_contract import declared
from states.lookup import Found, Lookup
from states.rollout import ENGINE_CONDITIONS, METHODS, ROLLOUT, EngineFact
from states.spec import DefinitionError, Row

F = EngineFact
RESOURCES = [fact for fact in EngineFact if fact not in ENGINE_CONDITIONS]

#: Written from the documentation: + allowed, - refused, ? as its facts or the call's conditions say.
ALLOWED = """
                     AWAKE PAUSED UPDATING ASLEEP STOPPED
generate             ?     -      -        -      -
finish               +     +      -        -      +
pause_generation     +     +      +        +      -
continue_generation  +     +      -        +      -
flush_cache          ?     ?      +        +      -
begin_update         ?     ?      -        ?      -
receive              -     -      ?        -      -
check_weights        +     +      +        ?      -
end_update           -     -      ?        -      -
abort_update         +     +      +        +      +
release_weights      ?     ?      -        +      -
release_kv_cache     ?     ?      ?        +      -
resume_weights       +     +      +        +      -
resume_kv_cache      +     +      +        +      -
stop                 +     +      +        +      +
"""


def subsets(items):
    items = list(items)
    return [frozenset(some) for some in chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))]


def contract_kept(name, facts):
    state = ROLLOUT.state(name)
    return state.holds <= facts and not state.lacks & facts


# The table by itself


def test_table_is_as_documented():
    """For every state and event, over all facts its contract allows: always, never, or it depends."""
    states, *lines = [line.split() for line in ALLOWED.strip().splitlines()]
    found, expected = {}, {}
    for event, *marks in lines:
        for state, mark in zip(states, marks, strict=True):
            expected[event, state] = mark
            ways = [
                declared(ROLLOUT, state, event, facts | conditions) is not None
                for facts in subsets(RESOURCES)
                if contract_kept(state, facts)
                for conditions in subsets(ENGINE_CONDITIONS)
            ]
            found[event, state] = "+" if all(ways) else "?" if any(ways) else "-"

    assert found == expected
    assert [event for event, *_ in lines] == [event.name for event in sorted(ROLLOUT.events, key=_place(lines))]


def _place(lines):
    return lambda event: [name for name, *_ in lines].index(event.name)


def test_at_most_one_row_applies():
    """The choices between rows of one event exclude each other: their order means nothing."""
    for facts in subsets(RESOURCES):
        for state in (state.name for state in ROLLOUT.states if contract_kept(state.name, facts)):
            rows = [row for row in ROLLOUT.rows_from(state) if row.when <= facts and not row.unless & facts]
            assert len({row.event for row in rows}) == len(rows), (state, facts)


def test_lookup_finds_what_is_declared():
    """The running engine's lookup agrees with the table read naively, for all states, events and facts."""
    lookup = Lookup.of(ROLLOUT)
    for facts in subsets(EngineFact):
        for state in ROLLOUT.states:
            for event in ROLLOUT.events:
                found, expected = (
                    lookup.find(state.name, event.name, facts),
                    declared(ROLLOUT, state.name, event.name, facts),
                )
                assert (expected is None) == (not isinstance(found, Found))
                if expected is not None:
                    assert found.target == expected[0]
    assert lookup.allowed("STOPPED", frozenset()) == ("abort_update",)


def reached():
    """Every state with facts that any calls can lead to."""
    start = (ROLLOUT.initial, frozenset({F.WEIGHTS_IN, F.KV_IN}))
    seen, todo = {start}, [start]
    while todo:
        state, facts = todo.pop()
        for event in ROLLOUT.events:
            for conditions in subsets(ENGINE_CONDITIONS):
                after = declared(ROLLOUT, state, event.name, facts | conditions)
                if after is not None and (after := (after[0], after[1] - ENGINE_CONDITIONS)) not in seen:
                    seen.add(after)
                    todo.append(after)
    return seen


def test_what_can_be_reached_is_safe():
    """Whatever is called: contracts hold, requests have a version and memory, and no version outlives its weights."""
    found = reached()

    assert len(found) > 20
    for state, facts in found:
        assert contract_kept(state, facts), (state, facts)
        if F.REQUESTS in facts:
            assert {F.VERSION_HELD, F.WEIGHTS_IN, F.KV_IN} <= facts
            assert F.RECEIVING not in facts
        if F.VERSION_HELD in facts:
            assert F.WEIGHTS_IN in facts
            assert F.RECEIVING not in facts
        if state == "ASLEEP":
            assert not {F.WEIGHTS_IN, F.KV_IN} <= facts
        generates = declared(ROLLOUT, state, "generate", facts) is not None
        whole = {F.VERSION_HELD, F.WEIGHTS_IN, F.KV_IN} <= facts and not {F.PAUSED, F.RECEIVING} & facts
        assert generates == whole
        continues = declared(ROLLOUT, state, "continue_generation", facts) is not None
        assert not (continues and F.RECEIVING in facts and state != "STOPPED")


def test_every_refusal_has_words():
    """Wherever a public event has no row, the table says what to do instead."""
    rows = {(row.event, row.source) for row in ROLLOUT.rows}
    pairs = [(event.name, state.name) for event in ROLLOUT.events if not event.internal for state in ROLLOUT.states]

    assert [pair for pair in pairs if pair not in rows and not ROLLOUT.advice_for(*pair)] == []
    assert all(guard.reason and guard.advice for guard in ROLLOUT.guards)


@pytest.mark.parametrize(
    ("row", "finding"),
    [
        (Row("generate", "PAUSED", "<same>", ("accept_request",), ("has_version",)), "accept_request forbids PAUSED"),
        (Row("generate", "AWAKE", "<same>", ("accept_request",)), "accept_request needs VERSION_HELD"),
        (Row("begin_update", "ASLEEP", "UPDATING", ("open_update",), ("not_older",)), "open_update needs WEIGHTS_IN"),
        (Row("release_weights", "AWAKE", "ASLEEP", ("release_weights",)), "release_weights forbids REQUESTS"),
        (Row("continue_generation", "UPDATING", "AWAKE", ("open_admission",)), "AWAKE must lack RECEIVING"),
        (Row("end_update", "UPDATING", "AWAKE", ("hold_version",), ("all_came",)), "AWAKE must hold KV_IN"),
    ],
)
def test_unsafe_rows_can_not_be_declared(row, finding):
    """A row that would generate, update or release where it must not is a finding of the declaration."""
    rows = tuple(known for known in ROLLOUT.rows if (known.event, known.source) != (row.event, row.source))

    with pytest.raises(DefinitionError, match=finding):
        evolve(ROLLOUT, rows=(*rows, row))


# EngineState against the table


@contextmanager
def engine_with(*steps):
    """Led somewhere by (method, arguments...), with a thread that runs its requests until they are aborted."""
    engine = EngineState("engine")

    def run():
        while (request := engine.take()) is not None:
            while not engine.at_token(request):
                time.sleep(0.001)
            engine.finish(request)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for method, *arguments in steps:
            getattr(engine, method)(*arguments)
        yield engine
    finally:
        engine.stop()
        thread.join()


def told_by(engine):
    """Its facts, by what an engine's status would say."""
    held = engine.snapshot()
    return facts_told({**held, "pools": {pool: {"state": state} for pool, state in held["pools"].items()}})


VERSION = (("open_update", 1), ("end_update", 1))
REQUEST = (*VERSION, ("admit", [[1]], None))
PLACES = {
    "fresh": (),
    "version": VERSION,
    "request": REQUEST,
    "paused": (*VERSION, ("pause", "abort")),
    "paused fresh": (("pause", "wait"),),
    "kept request": (*REQUEST, ("pause", "keep")),
    "updating": (("open_update", 1),),
    "updating paused": (("pause", "keep"), ("open_update", 1)),
    "updating without cache": (("release", ["kv_cache"]), ("open_update", 1)),
    "updating paused without cache": (("pause", "keep"), ("release", ["kv_cache"]), ("open_update", 1)),
    "cache asleep": (*VERSION, ("release", ["kv_cache"])),
    "cache asleep paused": (*VERSION, ("pause", "keep"), ("release", ["kv_cache"])),
    "weights asleep": (*VERSION, ("release", ["weights"])),
    "weights asleep paused": (("pause", "abort"), ("release", ["weights"])),
    "asleep": (("release", ["weights", "kv_cache"]),),
    "asleep paused": (("pause", "abort"), ("release", ["weights", "kv_cache"])),
    "stopped": (("stop",),),
    "stopped updating": (("open_update", 1), ("stop",)),
}

#: Per case: event, the condition of the call that is true, method and arguments.
CASES = {
    "generate": ("generate", (), "admit", [[1]], None),
    "pause_generation": ("pause_generation", (), "pause", "abort"),
    "continue_generation": ("continue_generation", (), "resume_generation"),
    "flush_cache": ("flush_cache", (), "flush_cache"),
    "begin_update": ("begin_update", (), "open_update", 2),
    "begin_update older": ("begin_update", (F.OLDER,), "open_update", 0),
    "receive": ("receive", (), "receive"),
    "check_weights": ("check_weights", (), "check_weights"),
    "end_update": ("end_update", (), "end_update", 1),
    "end_update other": ("end_update", (F.OTHER_VERSION,), "end_update", 2),
    "end_update missing": ("end_update", (F.NAMES_MISSING,), "end_update", 1, ["b"]),
    "abort_update": ("abort_update", (), "abort_update"),
    "release_weights": ("release_weights", (), "release", ["weights"]),
    "release_kv_cache": ("release_kv_cache", (), "release", ["kv_cache"]),
    "resume_weights": ("resume_weights", (), "resume", ["weights"]),
    "resume_kv_cache": ("resume_kv_cache", (), "resume", ["kv_cache"]),
    "stop": ("stop", (), "stop"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", PLACES)
def test_every_pair(place, case):
    """Each event in each state: the declared target and facts, or a refusal that changes nothing and says why."""
    event, conditions, method, *arguments = CASES[case]
    with engine_with(*PLACES[place]) as engine:
        told = engine.snapshot()
        before = (engine.state, engine.facts())
        running = {F.RUNNING} if F.REQUESTS in before[1] and told["paused"] != "keep" else set()
        if F.OLDER in conditions and F.VERSION_HELD not in before[1]:
            conditions = ()
        expected = declared(ROLLOUT, before[0], event, before[1] | running | set(conditions))
        if expected is None:
            with pytest.raises(EngineError) as refused:
                getattr(engine, method)(*arguments)
            assert refused.value.operation == METHODS.get(event, event)
            assert f"State: {before[0]}" in refused.value.reason
            assert "Allowed here: " in refused.value.reason
            assert {**engine.snapshot(), "requests": 0} == {**told, "requests": 0}
            assert (engine.state, engine.facts()) == before
            return
        getattr(engine, method)(*arguments)
        ended = {F.REQUESTS} if event in ("pause_generation", "stop") else set()  # they tell requests to end
        after = (engine.state, engine.facts() - ended)
        assert after == (expected[0], expected[1] - running - set(conditions) - ended)
        assert told_by(engine) - ended == after[1]


def test_places_are_every_state():
    """The enumeration starts in all declared states and asks for all events but the one nobody can ask for."""
    states = set()
    for steps in PLACES.values():
        with engine_with(*steps) as engine:
            states.add(engine.state)
    assert states == {state.name for state in ROLLOUT.states}
    assert {event for event, *_ in CASES.values()} == {event.name for event in ROLLOUT.events} - {"finish"}


def test_refusals_read_well():
    """A refusal says what was wrong with this call, what to do, where the engine is and what it takes there."""
    with engine_with(*VERSION, ("pause", "keep")) as engine, pytest.raises(EngineError) as refused:
        engine.open_update(0)

    assert str(refused.value) == (
        "rollout engine engine: begin_update: it holds a newer version, and this one is older (version 0). "
        "abort_update() or release(('weights',)) lets go of the newer one. State: PAUSED (keep), version 1. Allowed "
        "here: pause_generation, continue_generation, flush_cache, begin_update, check_weights, abort_update, release, "
        "resume."
    )


# Rows that wait


def test_row_under_way_admits_nothing():
    """While accepted requests end for an update, no other is accepted, and other events wait for it."""
    engine = EngineState("engine")
    for method, *arguments in REQUEST:
        getattr(engine, method)(*arguments)
    request = engine.take()
    aborting = threading.Thread(target=engine.abort_update)
    aborting.start()
    while not request.aborted:
        time.sleep(0.001)

    with pytest.raises(EngineError, match="abort_update is under way"):
        engine.admit([[1]], None)
    assert engine.snapshot()["moving"] == "abort_update"
    continuing = threading.Thread(target=engine.resume_generation)
    continuing.start()
    continuing.join(0.05)
    assert continuing.is_alive()
    engine.finish(request)
    aborting.join()
    continuing.join()
    assert engine.state == "AWAKE"
    assert engine.version is None


def test_stop_waits_for_nobody():
    """A row that waits when the engine stops is refused, and requests that wait are told."""
    engine, outcomes, errors = EngineState("engine"), [], []
    for method, *arguments in REQUEST:
        getattr(engine, method)(*arguments)
    engine.admit([[2]], None, outcomes.append)
    request = engine.take()

    def abort():
        try:
            engine.abort_update()
        except EngineError as error:
            errors.append(error)

    aborting = threading.Thread(target=abort)
    aborting.start()
    while not request.aborted:
        time.sleep(0.001)
    engine.stop()
    aborting.join()

    assert engine.state == "STOPPED"
    assert engine.version == 1
    assert "stopping" in errors[0].reason
    assert "stopping" in outcomes[0].reason
    engine.finish(request)
    engine.abort_update()
    assert engine.version is None


@pytest.mark.parametrize(("method", "before"), [("release", ()), ("resume", (("release", ["weights", "kv_cache"]),))])
def test_memory_that_does_not_move(method, before):
    """Where a pool's memory can not be moved, that pool and those after it are what they were; then it goes on."""
    with engine_with(*before) as engine:
        facts = engine.facts()

        def fail(pool):
            if pool == "kv_cache":
                assert engine.snapshot()["moving"]  # no lock is held meanwhile
                raise MemoryError(pool)

        with pytest.raises(MemoryError):
            getattr(engine, method)(["kv_cache", "weights"], fail)
        assert engine.facts() ^ facts == {F.WEIGHTS_IN}
        assert engine.snapshot()["moving"] is None
        assert getattr(engine, method)(["kv_cache", "weights"]) == {"kv_cache"}


# Any calls in any order


class EngineMachine(RuleBasedStateMachine):
    """One thread calls everything; after each call the engine is where the table, read by ``declared``, puts it."""

    def __init__(self):
        super().__init__()
        self.engine = EngineState("engine")
        self.at, self.true = ROLLOUT.initial, frozenset({F.WEIGHTS_IN, F.KV_IN})
        self.held, self.update = None, None
        self.running = None

    def expect(self, event, act, *conditions):
        """Whether the table allowed it; the engine must agree."""
        true = self.true | set(conditions)
        kept = self.engine.snapshot()["paused"] == "keep"
        if F.REQUESTS in self.true and not (kept and self.running is None):
            true |= {F.RUNNING}
        expected = declared(ROLLOUT, self.at, event, true)
        try:
            act()
        except EngineError:
            assert expected is None
            return False
        assert expected is not None
        self.at, self.true = expected[0], expected[1] - ENGINE_CONDITIONS
        return True

    @rule()
    def generate(self):
        self.expect("generate", lambda: self.engine.admit([[1]], None))

    @rule()
    def run_requests(self):
        """All that are accepted run and end, unless they are kept."""
        ended = False
        while F.REQUESTS in self.engine.facts() and self.engine.snapshot()["paused"] != "keep":
            self.engine.finish(self.engine.take())
            ended = True
        if ended:
            assert self.expect("finish", lambda: None)

    @rule(mode=st.sampled_from(("wait", "abort", "keep")))
    def pause(self, mode):
        if mode != "keep":
            self.run_requests()
        if F.REQUESTS not in self.engine.facts() or mode == "keep":
            self.expect("pause_generation", lambda: self.engine.pause(mode))

    @rule()
    def resume_generation(self):
        self.expect("continue_generation", self.engine.resume_generation)

    @rule(method=st.sampled_from(("flush_cache", "check_weights", "receive")))
    def look(self, method):
        self.expect(method, getattr(self.engine, method))

    @rule(version=st.integers(0, 3))
    def begin(self, version):
        self.let_aborted_requests_end()
        older = [F.OLDER] if self.held is not None and version < self.held else []
        if self.expect("begin_update", lambda: self.engine.open_update(version), *older):
            self.held, self.update = None, version

    @rule(version=st.integers(0, 3), missing=st.sampled_from(((), (), ("b",))))
    def end(self, version, missing):
        wrong = ([F.OTHER_VERSION] if version != self.update else []) + ([F.NAMES_MISSING] if missing else [])
        if self.expect("end_update", lambda: self.engine.end_update(version, missing), *wrong):
            self.held, self.update = version, None

    @rule()
    def abort(self):
        self.let_aborted_requests_end()
        assert self.expect("abort_update", self.engine.abort_update)
        self.held = self.update = None

    def let_aborted_requests_end(self):
        """Nobody runs them here, so kept ones would be waited for for ever."""
        if F.REQUESTS in self.engine.facts():
            self.resume_generation()
            self.run_requests()

    @rule(method=st.sampled_from(("release", "resume")), pool=st.sampled_from(("weights", "kv_cache")))
    def move(self, method, pool):
        if self.expect(f"{method}_{pool}", lambda: getattr(self.engine, method)([pool])) and method == "release":
            self.held = None if pool == "weights" else self.held

    @invariant()
    def engine_is_where_the_table_says(self):
        assert (self.engine.state, self.engine.facts()) == (self.at, self.true)
        assert (self.engine.version, self.engine.snapshot()["update"]) == (self.held, self.update)
        assert told_by(self.engine) == self.true


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
