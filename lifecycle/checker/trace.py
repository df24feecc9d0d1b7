"""A path through a machine, as a value: what the checker finds, and tables, JSON and diagrams show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen


@frozen
class Change:
    """A fact that a step changed. ``step`` is the effect, or what unwound it, or "" for a move of the environment."""

    fact: str
    before: bool
    after: bool


@frozen
class TraceEffect:
    """One effect that had something to do. ``outcome``: "done", "failed" (here it raised) or "undone" (an inverse)."""

    name: str
    outcome: str
    changes: tuple[Change, ...] = ()


@frozen
class Step:
    """One event. States are written as users read them, ``SWITCHED(ref)``.

    ``outcome``: "done" (committed), "undone" (an effect failed and all was unwound), "fault" (it could not be), or
    "stopped" (the invariant broke inside it; ``target`` is then where the event was going).
    """

    event: str
    tag: str | None
    source: str
    target: str
    outcome: str
    effects: tuple[TraceEffect, ...] = ()


@frozen
class Trace:
    """The shortest way found to break ``invariant``; ``why`` says what that costs."""

    machine: str
    invariant: str
    why: str
    detail: str
    tags: tuple[str, ...]
    steps: tuple[Step, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def trace_from_plain(plain: Mapping[str, Any]) -> Trace:
    """Read what ``to_plain`` wrote. Raises ValueError that names what is missing or wrong."""
    try:
        steps = tuple(_step(step) for step in plain["steps"])
        names = {name: str(plain[name]) for name in ("machine", "invariant", "why", "detail")}
        return Trace(**names, tags=tuple(map(str, plain["tags"])), steps=steps)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no trace: {type(error).__name__} {error}") from error


def _step(plain: Mapping[str, Any]) -> Step:
    effects = tuple(
        TraceEffect(
            str(effect["name"]),
            str(effect["outcome"]),
            tuple(Change(str(c["fact"]), bool(c["before"]), bool(c["after"])) for c in effect["changes"]),
        )
        for effect in plain["effects"]
    )
    tag = plain["tag"]
    texts = {name: str(plain[name]) for name in ("event", "source", "target", "outcome")}
    return Step(**texts, tag=None if tag is None else str(tag), effects=effects)
