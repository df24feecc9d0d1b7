"""What the demo promises, each promise a pure function over what was seen.

Records of the journal come in their order; an *event* is what stands between two commits, a *cycle* what stands
between two sleeps, a *step* a cycle with a training phase in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from attrs import frozen

from lifecycle.journal import Record

OUT, IN = "device_to_host", "host_to_device"
_WEIGHTS = "weights"


@frozen
class Check:
    """One promise: whether it was kept, what was measured, and what was required."""

    name: str
    passed: bool
    measured: str
    required: str


@frozen
class Event:
    """One committed event: its records, the commit last, and the version that the device showed before it."""

    records: tuple[Record, ...]
    shown_before: int | None

    @property
    def commit(self) -> Record:
        return self.records[-1]

    @property
    def name(self) -> str:
        return self.commit.event

    def moved(self, direction: str | None = None, region: str | None = None) -> int:
        """Bytes copied between device and host."""
        return sum(
            record.nbytes
            for record in self.records
            if record.direction is not None
            and direction in (None, record.direction)
            and region in (None, record.region)
        )


def events(records: Iterable[Record]) -> list[Event]:
    """Committed events; what was rolled back or failed is left out."""
    found: list[Event] = []
    open_records: list[Record] = []
    shown: int | None = None
    for record in records:
        open_records.append(record)
        if record.kind in ("unwind", "fault", "attach"):
            open_records = []
        if record.kind == "commit":
            found.append(Event(tuple(open_records), shown))
            open_records = []
        if record.kind in ("commit", "attach"):
            shown = record.version
    return found


def steps(found: Sequence[Event]) -> list[list[Event]]:
    """The events of each step, its sleep last."""
    cycles: list[list[Event]] = [[]]
    for event in found:
        cycles[-1].append(event)
        if event.name == "sleep":
            cycles.append([])
    return [cycle for cycle in cycles if any(event.name == "end_training" for event in cycle)]


def no_allocation(records: Sequence[Record]) -> Check:
    """Host buffers are allocated until every part has one, in the first step, and never again."""
    found = steps(events(records))
    settled = found[0][-1].commit.seq if found else 0
    late = [record for record in records if record.kind == "allocate" and record.seq > settled]
    early = sum(record.kind == "allocate" for record in records) - len(late)
    measured = f"{len(late)} ({sum(record.nbytes for record in late)} bytes), after {early} before"
    return Check("host allocations after the first step", bool(found) and not late, measured, "0")


def copied_out_once(records: Sequence[Record]) -> Check:
    """However often they are slept on, synced and restored, trained weights leave the device once."""
    found = events(records)
    trained = [event.commit.version for event in found if event.name == "end_training"]
    copies = Counter(
        record.version
        for event in found
        for record in event.records
        if record.direction == OUT and record.slot == "trained"
    )
    counts = [copies[version] for version in trained]
    passed = bool(counts) and set(counts) == {1}
    return Check("copies to the host of each trained version", passed, _listed(counts), "1 each")


def restored_once(records: Sequence[Record], tag: str, in_first: int) -> Check:
    """A tag's weights come back once in each step; in the first ``in_first`` times."""
    counts = [_restores(step, tag) for step in steps(events(records))]
    expected = [in_first, *[1] * (len(counts) - 1)]
    required = "1 in each step" if in_first else "0 in step 1, then 1 in each"
    return Check(f"restores of '{tag}' per step", bool(counts) and counts == expected, _listed(counts), required)


def _restores(step: Iterable[Event], tag: str) -> int:
    """How often the slot that was restored most often was."""
    slots = Counter(
        record.slot
        for event in step
        for record in event.records
        if record.direction == IN and record.region == _WEIGHTS and record.tag == tag
    )
    return max(slots.values(), default=0)


def free_switch(records: Sequence[Record]) -> Check:
    """Tags are names: between two names of one version there is nothing to copy."""
    same = [e for e in events(records) if e.name == "switch" and e.shown_before == e.commit.version]
    return _no_bytes("bytes copied by a switch between two tags of one version", same, Event.moved)


def sleep_after_sync(records: Sequence[Record]) -> Check:
    """The sync has made the host copy that the sleep needs."""
    after = [b for a, b in pairwise(events(records)) if a.name == "finish_sync" and b.name == "sleep"]
    name = "weight bytes copied out by a sleep that follows a sync"
    return _no_bytes(name, after, lambda event: event.moved(OUT, _WEIGHTS))


def free_evaluation(records: Sequence[Record]) -> Check:
    """What was only looked at need not be saved."""
    after = [b for a, b in pairwise(events(records)) if a.name == "wake_up" and b.name == "sleep"]
    return _no_bytes("bytes copied out by wake, evaluate, sleep", after, lambda event: event.moved(OUT))


def _no_bytes(name: str, found: Sequence[Event], moved: Callable[[Event], int]) -> Check:
    total = sum(moved(event) for event in found)
    return Check(name, bool(found) and total == 0, f"{total} in {len(found)}", "0, in at least 1")


def _listed(counts: Iterable[int]) -> str:
    return " ".join(map(str, counts)) or "nothing happened"


def journal_checks(records: Sequence[Record]) -> tuple[Check, ...]:
    return (
        no_allocation(records),
        copied_out_once(records),
        restored_once(records, "ref", in_first=1),
        restored_once(records, "actor", in_first=0),
        free_switch(records),
        sleep_after_sync(records),
        free_evaluation(records),
    )


def memory_returned(owned: int, after_backward: int, after_sleep: int) -> Check:
    """Anonymous memory falls by what the actor owned: weights, gradients and optimizer state."""
    fallen = after_backward - after_sleep
    measured = f"{fallen / owned:.1%} of {owned / 2**20:.1f} MiB"
    return Check("anonymous memory given back by a sleep", fallen >= 0.95 * owned, measured, "≥ 95 %")


def same_logits(equal: Sequence[bool]) -> Check:
    """``equal`` has one entry per sleep and wake: whether the logits of a fixed prompt were the same bits."""
    measured = f"{sum(equal)} of {len(equal)} bit-identical"
    return Check("logits before a sleep and after the wake", bool(equal) and all(equal), measured, "all bit-identical")


def same_answer(engine_version: int | None, version: int, engine: Sequence[int], actor: Sequence[int]) -> Check:
    same = list(engine) == list(actor)
    told = f"version {engine_version} and {version}, {'the same' if same else 'different'} {len(actor)} tokens"
    name = "greedy answers of engine and actor"
    return Check(name, same and engine_version == version, told, "one version, the same tokens")
