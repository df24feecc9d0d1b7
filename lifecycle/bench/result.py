"""What a benchmark found, as plain values: groups of bars to compare, figures, and the lines it had to hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import Factory, asdict, field, frozen

from lifecycle.bench.machine import machine_in_words
from lifecycle.bench.timing import Times

Role = Literal["ours", "peer", "limit"]
Unit = Literal["s", "B"]
Operator = Literal["<=", ">="]


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


def _bars(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    return tuple(bars)


@frozen
class Bar:
    """One thing that was measured. ``values`` are its rounds, in the group's unit."""

    name: str
    role: Role
    values: tuple[float, ...] = field(converter=_floats)
    note: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.value}


@frozen
class Group:
    """Bars that are compared with each other and with one limit, in seconds or bytes: less is better.

    ``limit``: what the link, or the least that must move, allows, in the same unit; from the same run.
    """

    title: str
    unit: Unit
    bars: tuple[Bar, ...] = field(converter=_bars)
    limit: float | None = None
    limit_name: str = ""

    def to_plain(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "limit": self.limit,
            "limit_name": self.limit_name,
            "bars": [bar.to_plain() for bar in self.bars],
        }


@frozen
class Accepted:
    """A promise and what became of it: ``got`` has to be at most, or at least, ``wanted``."""

    line: str
    operator: Operator
    wanted: float
    got: float
    unit: str = ""

    @property
    def ok(self) -> bool:
        return self.got <= self.wanted if self.operator == "<=" else self.got >= self.wanted

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@frozen
class Result:
    """All of one run. ``left_out`` says which peers could not be measured here, and why."""

    bench: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    groups: tuple[Group, ...]
    figures: Mapping[str, Any] = Factory(dict)
    accepted: tuple[Accepted, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "groups": [group.to_plain() for group in self.groups],
            "figures": dict(self.figures),
            "accepted": [line.to_plain() for line in self.accepted],
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }


def from_plain(plain: Mapping[str, Any]) -> Result:
    """The result that ``to_plain`` wrote. Raises ValueError where it is not one."""
    if isinstance(plain, Mapping) and "groups" not in plain:
        raise ValueError(
            "this is no result of `lifecycle bench` that has bars; `overhead` is drawn while it is measured, with "
            "--picture, and `check` not at all"
        )
    try:
        groups = tuple(_group(group) for group in plain["groups"])
        accepted = tuple(Accepted(**{k: v for k, v in line.items() if k != "ok"}) for line in plain["accepted"])
        rest = (plain["figures"], accepted, tuple(plain["left_out"]), tuple(plain["notes"]))
        machine_in_words(plain["machine"])
        return Result(plain["bench"], plain["machine"], plain["settings"], groups, *rest)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no result of `lifecycle bench`: {type(error).__name__}: {error}") from error


def _group(plain: Mapping[str, Any]) -> Group:
    bars = (Bar(bar["name"], bar["role"], [float(one) for one in bar["values"]], bar["note"]) for bar in plain["bars"])
    return Group(plain["title"], plain["unit"], bars, plain["limit"], plain["limit_name"])


def bar(name: str, role: Role, times: Times, note: str = "", returned: bool = False) -> Bar:
    """The rounds in seconds until all was done, or until the call ``returned``."""
    return Bar(name, role, tuple(took.returned if returned else took.done for took in times.rounds), note)


def by_length(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Ours first, then the others, quickest first."""
    return tuple(sorted(bars, key=lambda one: (one.role != "ours", one.value)))


def amount(value: float, unit: Unit) -> str:
    """Seconds in ms or s, bytes in MiB or GiB."""
    if unit == "s":
        return f"{digits(value)} s" if value >= 1 else f"{digits(value * 1e3)} ms"
    return f"{value / 2**30:.3f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"


def digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
