"""Small changes of the actor's declaration, to build broken machines from."""

from __future__ import annotations

from attrs import evolve

from lifecycle.checker.ground import Model
from lifecycle.checker.words import Instance
from states.actor import ACTOR

SMALL = Instance(tags=("ref",), engines=("a",), slots=("trained",), labels=())


def rows_changed(spec, change, event, source=None, target=None):
    """The machine with ``change`` applied to these rows; at least one of them is another one then."""
    rows = tuple(
        change(row) if row.event == event and source in (None, row.source) and target in (None, row.target) else row
        for row in spec.rows
    )
    assert rows != spec.rows, f"no row of {event} was changed"
    return evolve(spec, rows=rows)


def without_effect(effect, event, source=None, spec=ACTOR):
    """The rows of this event no longer have the effect."""
    kept = lambda row: evolve(row, effects=tuple(name for name in row.effects if name != effect))  # noqa: E731
    return rows_changed(spec, kept, event, source)


def without_guard(guard, event, source=None, spec=ACTOR):
    """The rows of this event no longer have the guard."""
    kept = lambda row: evolve(row, guards=tuple(name for name in row.guards if name != guard))  # noqa: E731
    return rows_changed(spec, kept, event, source)


def with_effects(effects, event, source=None, target=None, spec=ACTOR):
    """The rows of this event have these effects."""
    return rows_changed(spec, lambda row: evolve(row, effects=tuple(effects)), event, source, target)


def relaxed(name, *facts, spec=ACTOR):
    """The effect no longer says that it needs, forbids, gives or takes these facts."""
    old = spec.effect(name)
    fields = {key: getattr(old, key) - set(facts) for key in ("needs", "forbids", "gives", "takes")}
    assert any(fields[key] != getattr(old, key) for key in fields), f"{name} says nothing of these facts"
    effects = tuple(evolve(one, **fields) if one.name == name else one for one in spec.effects)
    return evolve(spec, effects=effects)


def silent(*facts, states=None, spec=ACTOR):
    """These states say nothing of these facts; or no state and no event does."""

    def changed(one):
        return evolve(one, holds=one.holds - set(facts), lacks=one.lacks - set(facts))

    events = tuple(evolve(one, gives=one.gives - set(facts), takes=one.takes - set(facts)) for one in spec.events)
    return evolve(
        spec,
        states=tuple(changed(one) if states is None or one.name in states else one for one in spec.states),
        events=spec.events if states is not None else events,
    )


def model(spec=ACTOR, instance=SMALL, **meanings):
    """What is checked: the declaration, with these effects meaning something else."""
    return Model(spec, instance, meanings)
