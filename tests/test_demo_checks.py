"""What the demo promises, on journals written by hand: right ones pass, and each broken promise is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from demo_journal import good

from lifecycle.demo import checks
from lifecycle.journal import Record


def failed(records: list[Record]) -> list[str]:
    return [check.name for check in checks.journal_checks(records) if not check.passed]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_journal_without_fault_passes(steps: int) -> None:
    """Every promise is read off the records of a right run, however many steps it has."""
    assert failed(good(steps).records) == []


def test_an_empty_journal_proves_nothing() -> None:
    """Where nothing happened, nothing was promised and kept: every check fails."""
    assert len(failed([])) == 7


def insert(event: str, nth: int, *extra: Record) -> Callable[[list[Record]], list[Record]]:
    """Put records before the nth commit of an event (from 0; -1 is the last)."""

    def change(records: list[Record]) -> list[Record]:
        places = [at for at, record in enumerate(records) if (record.kind, record.event) == ("commit", event)]
        at = places[nth]
        changed = [*records[:at], *extra, *records[at:]]
        return [evolve(record, seq=seq) for seq, record in enumerate(changed, start=1)]

    return change


def copied(event: str, direction: str, **fields: Any) -> Record:
    return Record(0, 0.0, "effect", event, direction=direction, nbytes=1, **fields)


WEIGHTS = {"slot": "trained", "region": "weights"}
VIOLATIONS = {
    "host allocations after the first step": insert("sleep", 2, Record(0, 0.0, "allocate", "sleep", nbytes=1)),
    "copies to the host of each trained version": insert(
        "start_sync", 2, copied("start_sync", checks.OUT, version=3, **WEIGHTS)
    ),
    "restores of 'ref' per step": insert("wake_up", 1, copied("wake_up", checks.IN, tag="ref", version=1, **WEIGHTS)),
    "restores of 'actor' per step": insert("switch", 0, copied("switch", checks.IN, tag="actor", version=1, **WEIGHTS)),
    "bytes copied by a switch between two tags of one version": insert(
        "switch", 0, copied("switch", checks.OUT, version=1, **WEIGHTS)
    ),
    "weight bytes copied out by a sleep that follows a sync": insert(
        "sleep", 1, copied("sleep", checks.OUT, **WEIGHTS)
    ),
    "bytes copied out by wake, evaluate, sleep": insert(
        "sleep", -1, copied("sleep", checks.OUT, slot="optimizer", region="optimizer")
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_broken_promise_is_noticed(name: str) -> None:
    """One byte too many in the wrong place fails the check of that promise."""
    assert name in failed(VIOLATIONS[name](good().records))


def test_what_was_rolled_back_is_no_event() -> None:
    """Records of an event that was unwound count for no other event."""
    log = good()
    log.copy("switch", checks.OUT, 4, tag="ref")
    log.add("unwind", "switch", tag="ref")
    log.commit("sleep", "ASLEEP", None)
    assert failed(log.records) == []


@pytest.mark.parametrize(("after_sleep", "passed"), [(0, True), (50, True), (51, False), (1000, False)])
def test_memory_must_come_back(after_sleep: int, passed: bool) -> None:
    """At least 95 % of what the actor owned."""
    assert checks.memory_returned(1000, 1000, after_sleep).passed is passed


def test_logits_must_be_the_same_bits_every_time() -> None:
    """One that differs, or none at all, is a failure."""
    assert checks.same_logits([True, True]).passed
    assert not checks.same_logits([True, False]).passed
    assert not checks.same_logits([]).passed


def test_the_engine_must_answer_with_this_version() -> None:
    """The same tokens from another version prove nothing, and other tokens from this one are wrong."""
    assert checks.same_answer(3, 3, [1, 2], [1, 2]).passed
    assert not checks.same_answer(2, 3, [1, 2], [1, 2]).passed
    assert not checks.same_answer(3, 3, [1, 2], [1, 3]).passed
