"""A machine of one's own: what may drive an actor, and the effects that its owner performs.

Effects that ``lifecycle.work`` does not know are the owner's: each has a handler. Everything that the controller could
only find out while an event runs (an effect without a handler, a guard that looks at what nobody can see) is looked
for when the actor is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from lifecycle.plan import CONDITIONS
from lifecycle.versions import Facts
from lifecycle.work import WORK, own_facts
from states.spec import Effect, MachineSpec


@frozen
class EffectCall:
    """What a handler is told: which effect of which event, and what the controller knows at this moment.

    ``tag`` is the event's, ``shown`` the tag whose version the device showed when the event began. ``facts`` has the
    tags, versions and copies. Asking the actor for another event from inside a handler is refused.
    """

    event: str
    effect: str
    tag: str | None
    shown: str | None
    facts: Facts


#: Does the effect and returns the bytes it moved, or None. What it raises undoes the event, by the inverses.
Handler = Callable[[EffectCall], int | None]


def checked_handlers(spec: MachineSpec, perform: Mapping[str, Handler] | None) -> dict[str, Handler]:
    """The handlers, where they are those that the machine needs. Raises ValueError with every finding."""
    handlers = dict(perform or {})
    found = [*_undrivable(spec), *_unobservable(spec), *_foreign_facts(spec), *_wrong_handlers(spec, handlers)]
    if found:
        raise ValueError(
            f"machine {spec.name!r} can not drive this actor:\n" + "\n".join(f"- {text}" for text in found)
        )
    return handlers


def moved_bytes(effect: str, result: Any) -> int:
    """What the handler returned. Raises TypeError naming the effect."""
    if result is None:
        return 0
    if not isinstance(result, int):
        raise TypeError(f"the handler of {effect} returned {result!r}: give the bytes it moved, or None")
    return result


def _undrivable(spec: MachineSpec) -> Iterator[str]:
    """What the controller itself fires must be there."""
    events = {event.name for event in spec.events}
    for event in ("fault", "close"):
        if event not in events:
            yield f"it has no event {event!r}"
    for row in spec.rows:
        if row.event == "fault" and row.target != "FAULTED":
            yield f"row fault from {row.source} leads to {row.target}; an effect that is half-done leads to FAULTED"


def _unobservable(spec: MachineSpec) -> Iterator[str]:
    asked = {
        **{f"guard {guard.name}": guard.requires | guard.forbids for guard in spec.guards},
        **{f"use {use.operation}": use.needs | use.forbids | use.or_when for use in spec.uses},
        **{f"row {row.event} from {row.source}": row.when | row.unless for row in spec.rows},
    }
    for where, facts in asked.items():
        for fact in sorted(facts - own_facts(facts) - CONDITIONS.keys()):
            yield f"{where} asks for {fact.name}, which can not be observed when an event is asked for"


def _foreign_facts(spec: MachineSpec) -> Iterator[str]:
    """The library keeps its own facts, by looking; the owner's are kept by what the owner's effects declare."""
    for effect in spec.effects:
        changed, own = effect.gives | effect.takes, own_facts(effect.gives | effect.takes)
        if effect.name in WORK:
            for fact in sorted(own):
                yield f"effect {effect.name} is this library's: it can not give or take {fact.name}, one of your facts"
        else:
            for fact in sorted(changed - own):
                yield f"effect {effect.name} is your own: it can not give or take {fact.name}, a fact of this library"


def _wrong_handlers(spec: MachineSpec, handlers: Mapping[str, Handler]) -> Iterator[str]:
    declared = {effect.name for effect in spec.effects}
    run = {name for row in spec.rows for name in row.effects}
    needed = [effect for effect in spec.effects if effect.name not in WORK and effect.name in _with_inverses(spec, run)]
    for effect in needed:
        if effect.name not in handlers:
            yield f"effect {effect.name} has no handler: give perform={{{effect.name!r}: ...}}"
    for name, handler in handlers.items():
        if name in WORK:
            yield f"effect {name} is this library's: it takes no handler"
        elif name not in declared:
            yield f"there is no effect {name!r} for the handler given; own effects: {_names(needed)}"
        elif not callable(handler):
            yield f"the handler of {name} is {handler!r}, which can not be called"


def _with_inverses(spec: MachineSpec, names: Iterable[str]) -> set[str]:
    names = set(names)
    return names | {inverse for name in names if (inverse := spec.effect(name).inverse) is not None}


def _names(effects: Iterable[Effect]) -> str:
    return ", ".join(effect.name for effect in effects) or "none"
