"""Journals of demo runs, written by hand."""

from __future__ import annotations

from typing import Any

from lifecycle.demo import checks
from lifecycle.journal import Record


class Log:
    """Writes records by hand."""

    def __init__(self) -> None:
        self.records: list[Record] = [Record(1, 0.0, "attach", "attach", target="RESIDENT", version=1)]

    def add(self, kind: Any, event: str, **fields: Any) -> None:
        seq = len(self.records) + 1
        self.records.append(Record(seq, float(seq), kind, event, **fields))

    def commit(self, event: str, target: str, version: int | None) -> None:
        self.add("commit", event, target=target, version=version)

    def copy(self, event: str, direction: str, version: int | None, **fields: Any) -> None:
        where = {"slot": "trained", "region": "weights", "nbytes": 100, **fields}
        self.add("effect", event, direction=direction, version=version, **where)

    def sync(self, version: int, copies: int = 1) -> None:
        for _ in range(copies):
            self.copy("start_sync", checks.OUT, version, tag="actor")
        self.commit("start_sync", "SYNCING", version)
        self.commit("finish_sync", "RESIDENT", version)

    def step(self, old: int, new: int) -> None:
        self.copy("wake_up", checks.IN, 1, tag="ref")
        self.commit("wake_up", "SWITCHED(ref)", 1)
        if old != 1:
            self.copy("switch", checks.IN, old, tag="actor")
        self.commit("switch", "RESIDENT", old)
        self.commit("begin_training", "RESIDENT", new)
        self.commit("end_training", "RESIDENT", new)
        self.sync(new)
        self.copy("sleep", checks.OUT, None, slot="optimizer", region="optimizer")
        self.commit("sleep", "ASLEEP", None)


def good(steps: int = 3) -> Log:
    """What a run without fault writes."""
    log = Log()
    log.add("allocate", "start_sync", nbytes=100)
    log.sync(1)
    log.commit("sleep", "ASLEEP", None)
    log.add("allocate", "start_sync", nbytes=100)
    for number in range(steps):
        log.step(number + 1, number + 2)
    log.copy("wake_up", checks.IN, steps + 1, tag="actor")
    log.commit("wake_up", "RESIDENT", steps + 1)
    log.copy("sleep", checks.OUT, None, slot="optimizer", region="optimizer", nbytes=0)
    log.commit("sleep", "ASLEEP", None)
    return log
