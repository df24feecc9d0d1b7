"""Machines and traces that the tests of the pictures share."""

from __future__ import annotations

from enum import StrEnum

from lifecycle.checker.trace import Step, Trace, TraceEffect
from states.resources import Fact
from states.spec import SAME, Effect, Event, Guard, MachineSpec, Row, State

ODD = ['say "hi"', "a<b>&c", "pipe|bar", "naïve Ωmega 状態", "back\\slash", "end", "{curly} [square] #hash `tick`"]


class Own(StrEnum):
    """A fact of somebody's own machine."""

    POWER = 'power is "on" & <stable>'


def odd_machine() -> MachineSpec:
    """Every name has something that one of the formats could trip over; there is one row per event."""
    states = tuple(State(name, f"doc of {name}", holds=[Own.POWER]) for name in ODD)
    events = tuple(Event(f"go {name}", "doc | of <it>") for name in ODD)
    rows = tuple(
        Row(f"go {name}", name, ODD[(place + 1) % len(ODD)], ("spin & <turn>",), ('not "now"|ever',))
        for place, name in enumerate(ODD)
    )
    return MachineSpec(
        name='odd "machine" <&|>',
        initial=ODD[0],
        states=states,
        events=events,
        effects=(Effect("spin & <turn>", "doc", harmless=True), Effect("agree", "all do", harmless=True)),
        guards=(Guard('not "now"|ever', "it is | now", "wait", forbids=[Fact.SCOPE_OPEN]),),
        rows=rows,
    )


def small_machine(**changes) -> MachineSpec:
    """Two states, a no-op, a fault, and an end."""
    parts = {
        "name": "small",
        "initial": "ON",
        "states": (*map(State, ("ON", "OFF", "FAULTED"), ("runs", "rests", "stuck")), State("END", "over", final=True)),
        "events": tuple(Event(name, name) for name in ("stop", "start", "ping", "fault", "close")),
        "effects": (Effect("cut", "cuts"), Effect("agree", "all", harmless=True), Effect("warm", "w", harmless=True)),
        "guards": (),
        "rows": (
            Row("stop", "ON", "OFF", ("warm", "agree", "cut")),
            Row("start", "OFF", "ON", ("warm",)),
            Row("ping", "ON", SAME),
            Row("fault", "ON", "FAULTED"),
            Row("fault", "OFF", "FAULTED"),
            Row("fault", "FAULTED", SAME),
            *(Row("close", name, "END") for name in ("ON", "OFF", "FAULTED")),
            Row("close", "END", SAME),
        ),
    }
    return MachineSpec(**{**parts, **changes})


def small_trace(*outcomes: str) -> Trace:
    """stop, then start, ending as told; the path goes on from where the step before left it."""
    ways = [("stop", "ON", "OFF"), ("start", "OFF", "ON"), ("stop", "ON", "OFF")]
    steps = []
    for (event, source, target), outcome in zip(ways, outcomes, strict=False):
        end = {"undone": source, "fault": "FAULTED"}.get(outcome, target)
        steps.append(Step(event, None, source, end, outcome, (TraceEffect("warm", "done"),)))
    return Trace("small", "nothing is cut", "it hurts", "", (), tuple(steps))
