"""What the abstract meaning of an effect is made of: micro-steps, between any two of which it may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from attrs import field, frozen

from lifecycle.checker.formula import TRUE, Assignment, Expr
from lifecycle.checker.words import Words


def _last_wins(assignments: Iterable[Assignment]) -> tuple[Assignment, ...]:
    return tuple(dict(assignments).items())


@frozen
class Way:
    """One thing that may come of a micro-step, where ``when`` is true. Later assignments to a bit win."""

    sets: tuple[Assignment, ...] = field(default=(), converter=_last_wins)
    when: Expr = TRUE


@frozen
class Micro:
    """The smallest step of an effect, which may fail before it.

    ``real``: it may also fail after it, with the change made: the change is of memory, groups or engines, or can not be
    relied on from the moment the step begins. Other changes are noted only once the step has succeeded.

    ``when`` is false: there is nothing to do. ``succeeds`` is false: it can only fail. ``sound`` is false: it would do
    what it must not, which breaks the invariant that ``breaks`` names. Several ways: any of them may come about.
    """

    ways: tuple[Way, ...] = (Way(),)
    when: Expr = TRUE
    succeeds: Expr = TRUE
    sound: Expr = TRUE
    breaks: str = "readable_source"
    real: bool = False


@frozen
class Asked:
    """One event as it is asked for: which tags it is about, and what the caller chose."""

    words: Words
    event: str
    tag: str | None = None
    of: str | None = None
    shown: str | None = None  # the tag that the source state shows
    host_only: bool = False  # an engine reads host memory only
    rotate: str | None = None  # the tag that moves to 'actor' after the sync


#: Of one effect: the micro-steps for an event as it is asked for.
Meaning = Callable[[Asked], Iterable[Micro]]

Meanings = Mapping[str, Meaning]
NO_MEANINGS: Meanings = MappingProxyType({})


def note(*assignments: Iterable[Assignment], when: Expr = TRUE) -> Micro:
    """A micro-step with one way, whose change is noted when it has succeeded."""
    return Micro((Way(tuple(pair for group in assignments for pair in group)),), when)


def change(*assignments: Iterable[Assignment], when: Expr = TRUE) -> Micro:
    """A micro-step with one way, which changes what the facts are about: also where it fails right after."""
    return Micro((Way(tuple(pair for group in assignments for pair in group)),), when, real=True)


def look() -> tuple[Micro, ...]:
    """Something that changes no fact and may fail."""
    return (Micro(),)


@frozen
class Invariant:
    """``premise`` true and ``holds`` false breaks it. ``at_rest``: only committed states are asked."""

    name: str
    why: str
    premise: Callable[[Words], Expr]
    holds: Callable[[Words], Expr]
    at_rest: bool = False
    but_in: tuple[str, ...] = ()  # declared states in which it is not asked

    def formula(self, words: Words) -> Expr:
        return ~self.premise(words) | self.holds(words)
