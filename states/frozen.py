"""A frozen actor: a reference or a teacher that is served alone. It sleeps, wakes, takes weights and sends them.

What it has in common with the training actor it takes from there; it has no optimizer, and nothing of it trains.
"""

from __future__ import annotations

from attrs import evolve

from states.actor import ACTOR, GIVE_BACK, READ_BACK, RELEASE
from states.spec import MachineSpec, Match, Row, Use

_SETTLE = ("settle_writers", "check_structure", "adopt_optimizer_state", "verify_weights", "copy_out_weights")
_BRING = ("resume_forward_regions", "reload_groups", "restore_rest", "restore_weights")

STATES = (
    evolve(
        ACTOR.state("SWITCHED"),
        name="RESIDENT",
        doc="The device holds what 'actor' points at: forward only.",
        per_tag=False,
        shows="actor",
    ),
    *(ACTOR.state(name) for name in ("ASLEEP", "SYNCING", "FAULTED", "CLOSED")),
)

ROWS = (
    Row(
        "sleep",
        "RESIDENT",
        "ASLEEP",
        (*_SETTLE, "back_up_regions", "agree", *RELEASE),
        ("no_load", "no_scope", "no_device_reader", "addresses_free", "arrived"),
    ),
    ACTOR.row("sleep", "ASLEEP"),
    Row("wake_up", "ASLEEP", "RESIDENT", ("check_structure", "agree", *_BRING), ("memory_free",), Match.ACTOR),
    ACTOR.row("wake_up", "RESIDENT"),
    ACTOR.row("arrive", "RESIDENT"),
    evolve(ACTOR.row("load", "RESIDENT"), guards=("no_load", "no_device_reader", "arrived")),
    evolve(ACTOR.row("finish_load", "RESIDENT"), guards=("in_load",)),
    evolve(ACTOR.row("abort_load", "RESIDENT"), guards=("in_load",)),
    evolve(ACTOR.row("adopt", "RESIDENT"), guards=("no_load", "no_device_reader", "arrived")),
    evolve(ACTOR.row("start_sync", "RESIDENT"), guards=("no_load", "rotation_hidden", "arrived")),
    evolve(ACTOR.row("start_sync", "ASLEEP"), guards=("rotation_hidden",)),
    ACTOR.row("finish_sync", "SYNCING"),
    ACTOR.row("fail_sync", "SYNCING"),
    *(ACTOR.row("fault", state.name) for state in STATES if not state.final),
    evolve(
        ACTOR.row("recover", "FAULTED", to="RESIDENT"),
        effects=("agree", *READ_BACK, "copy_out_survivors", "check_copies", *_BRING),
    ),
    ACTOR.row("recover", "FAULTED", to="ASLEEP"),
    evolve(ACTOR.row("close", "RESIDENT"), guards=("no_load", "no_reader", "arrived")),
    evolve(ACTOR.row("close", "ASLEEP"), effects=("check_structure", "agree", *_BRING, *GIVE_BACK)),
    *(ACTOR.row("close", name) for name in ("SYNCING", "FAULTED", "CLOSED")),
)


def _with_inverses(names: set[str]) -> set[str]:
    more = names | {inverse for name in names if (inverse := ACTOR.effect(name).inverse) is not None}
    return names if more == names else _with_inverses(more)


_STATE_NAMES = {state.name for state in STATES}
_EVENTS = {row.event for row in ROWS}
_EFFECTS = _with_inverses({name for row in ROWS for name in row.effects})
_GUARDS = {name for row in ROWS for name in row.guards}

USES = (
    *(
        evolve(use, states=tuple(name for name in use.states if name in _STATE_NAMES))
        for use in ACTOR.uses
        if use.operation in ("weights", "forward", "state_dict", "load_state_dict")
    ),
    Use("backward", (), "nothing of a frozen actor trains", "Run its forwards under torch.no_grad()."),
)

FROZEN = MachineSpec(
    name="frozen",
    initial="RESIDENT",
    states=STATES,
    events=tuple(event for event in ACTOR.events if event.name in _EVENTS),
    effects=tuple(effect for effect in ACTOR.effects if effect.name in _EFFECTS),
    guards=tuple(guard for guard in ACTOR.guards if guard.name in _GUARDS),
    rows=ROWS,
    uses=USES,
)
