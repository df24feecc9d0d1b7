"""Every effect of every row made to fail, before it acts and after, with inverses that work and inverses that fail.

Training actors and frozen ones. Afterwards the actor is where it was, with the contract of that state kept, or it is
FAULTED and recover() works. Either way every tag still has its weights, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from scenarios import (
    TOKENS,
    assert_equal_weights,
    engine,
    load_noise,
    make_actor,
    make_busy,
    make_frozen,
    session,
    step,
    weights_of,
)

from lifecycle import EffectFailed, Faulted, LifecycleError
from lifecycle.testing.injection import Injected, failing
from lifecycle.testing.late import LateArena
from lifecycle.testing.observe import broken_contract
from states.actor import ACTOR
from states.frozen import FROZEN
from states.spec import MachineSpec, Row

pytestmark = pytest.mark.usefixtures("few_objects")

SPECS = (ACTOR, FROZEN)
#: Effects that have nothing to do in a row on one rank, or in a state that leaves them nothing, and why.
IDLE = {
    ("*", "*", "agree"): "one rank has nobody to agree with",
    ("wake_up", "RESIDENT", "reload_groups"): "awake, groups are up",
    ("wake_up", "SWITCHED", "reload_groups"): "awake, groups are up",
    ("start_sync", "RESIDENT", "raise_sync_groups"): "awake, groups are up",
    ("start_sync", "SWITCHED", "raise_sync_groups"): "awake, groups are up",
    ("finish_sync", "SYNCING", "lower_sync_groups"): "raised only from ASLEEP",
    ("fail_sync", "SYNCING", "lower_sync_groups"): "raised only from ASLEEP",
    ("close", "SYNCING", "lower_sync_groups"): "raised only from ASLEEP",
    ("recover", "FAULTED", "lower_sync_groups"): "no sync was open",
    ("recover", "FAULTED", "abandon_sync"): "no sync was open",
    ("close", "FAULTED", "lower_sync_groups"): "no sync was open",
    ("close", "FAULTED", "abandon_sync"): "no sync was open",
}
#: The same for one machine, or for one way of a row.
IDLE_THERE = {
    ("frozen", "sleep", "ASLEEP", "adopt_optimizer_state"): "it has no optimizer",
    ("frozen", "recover", "ASLEEP", "copy_out_everything"): "its memory is lost, and nothing is on the device",
    ("actor", "recover", "ASLEEP", "copy_out_everything"): "its memory is lost, and nothing is on the device",
}
#: Effects that only a backend with streams of its own, or one that copies both ways at once, leaves something to do.
OVERLAPPING = {"await_weights", "await_optimizer", "exchange_weights"}
CASES = [
    pytest.param(
        spec, row, effect, id=f"{spec.name}-{row.event}-{row.source}-{row.target.strip('<>')}-{row.match}-{effect}"
    )
    for spec in SPECS
    for row in spec.rows
    for effect in row.effects
    if (row.event, row.source, effect) not in IDLE and ("*", "*", effect) not in IDLE
    if (spec.name, row.event, row.target, effect) not in IDLE_THERE
]


class Case:
    """A busy actor, brought to where the row starts, with something to do for each of its effects."""

    def __init__(self, spec: MachineSpec, row: Row, effect: str) -> None:
        self.row, self.effect = row, effect
        memory = LateArena(poison=0xCB) if effect in OVERLAPPING else None
        if spec is FROZEN:
            self.actor, self.model = make_frozen(memory=memory)
            self.optimizer = None
        else:
            self.actor, self.model, self.optimizer = make_actor(memory=memory)
            make_busy(self.actor, self.model, self.optimizer)
        self.arguments: dict = {}
        self.engine = engine()
        self.known: dict | None = None  # every tag's weights, where reading them at last would be too late

    def prepare(self, sync: dict) -> None:
        getattr(self, f"_at_{self.row.source.lower()}")(sync)
        event = self.row.event
        if event.endswith("_sync"):
            self.arguments = {**sync, "rotate": (("old_actor", "actor"),), "host_copy": event == "start_sync"}
        elif event in ("wake_up", "switch", "load", "tag"):
            self.arguments = {"tag": self._tag(), **({"of": "actor"} if event == "tag" else {})}
        if event == "sleep" or (event == "load_optimizer"):
            self._replace_optimizer_state()

    def _tag(self) -> str:
        if self.row.event == "tag":
            return "old_actor"
        return {"actor": "actor", "shown": self._shown()}.get(self.row.match, "old_actor")

    def _shown(self) -> str:
        return "ref" if self.row.source == "SWITCHED" else "actor"

    def _replace_optimizer_state(self) -> None:
        """State that the memory backend does not own yet."""
        if self.optimizer is None:
            return
        if not self.actor._world.optimizer_appeared() and self.actor.state.name == "RESIDENT":
            parameter = self.model.body.weight
            self.optimizer.state[parameter]["note"] = torch.ones(3)

    def _at_resident(self, sync: dict) -> None:
        event = self.row.event
        if event == "begin_training":
            self.actor.sleep()  # discards gradients, which then come back as zeros
            self.actor.wake_up()
            load_noise(self.actor, self.model, "actor", 5)
            self.actor.tag("old_actor", "actor")  # a version with no copy that another tag needs
            self._replace_optimizer_state()
        elif event in ("end_training", "abort_training"):
            self.actor.sleep()
            self.actor.wake_up()
            self.actor.begin_training()
            step(self.model, self.optimizer)
            if event == "end_training":
                self._replace_optimizer_state()
        elif event in ("finish_load", "abort_load"):
            self._open_load("ref")
        elif event == "adopt":
            self.model.body.weight.data.add_(1.0)
        elif event in ("arrive", "arrive_optimizer"):
            self._on_its_way("actor")

    def _on_its_way(self, tag: str) -> None:
        """Whoever reads the weights now would wait for them: that is what the event is to do."""
        self.actor.sleep()
        self.known = weights_of(self.actor)
        self.actor.wake_up(tag)

    def _at_switched(self, sync: dict) -> None:
        if self.row.event == "arrive":
            self._on_its_way("ref")
            return
        if (self.row.event == "switch" and self.row.match == "actor") or self.row.event == "close":
            self.actor.sleep()
            self.actor.wake_up("ref")  # optimizer memory stays released
        else:
            self.actor.switch("ref")
        if self.row.event in ("sleep", "switch", "load", "close"):
            load_noise(self.actor, self.model, "ref", 7)  # shown, and nowhere else
            self._state_appears_asleep()
        if self.row.event == "start_sync":
            self.actor.switch("actor")
            load_noise(self.actor, self.model, "actor", 9)
            self.actor.tag("old_actor", "actor")
            self.actor.switch("old_actor")
        if self.row.event in ("finish_load", "abort_load"):
            self._open_load("old_actor")
        if self.row.event == "adopt":
            self.model.body.weight.data.add_(1.0)

    def _state_appears_asleep(self) -> None:
        if self.row.event == "sleep":
            self.optimizer.state[self.model.body.weight]["note"] = torch.ones(3)

    def _open_load(self, tag: str) -> None:
        self.actor._fire("load", tag=tag)
        with torch.no_grad():
            self.model.body.weight.fill_(0.25)

    def _at_asleep(self, sync: dict) -> None:
        self.actor.sleep()

    def _at_syncing(self, sync: dict) -> None:
        self.actor._fire("start_sync", **sync)

    def _at_faulted(self, sync: dict) -> None:
        if self.row.target == "ASLEEP":
            self._fault_asleep()
        elif self.effect == "copy_out_survivors":
            self._fault_with_a_single_copy()
        elif self.effect == "resume_forward_regions":
            self._fault_without_the_rest()
        else:
            self._fault_half_awake()
        assert self.actor.state.name == "FAULTED"

    def _fault_asleep(self) -> None:
        """Weights are gone, the rest is still there; an owner outside made gradients and workspaces meanwhile."""
        backend = self.actor._world.backend
        pause = backend.pause

        def only_weights(region):
            if region != "weights":
                raise Injected
            return pause(region)

        backend.pause = only_weights
        with pytest.raises(EffectFailed):
            self.actor.sleep()
        del backend.pause
        self.actor._world.adapter.workspaces["late"] = torch.ones(4)
        self.model.body.weight.grad = torch.ones(8, 8)

    def _fault_with_a_single_copy(self) -> None:
        """A loaded tag whose only copy is on the device, under a state that shows another."""
        self._open_load("ref")
        with failing(self.actor, {"copy_out_loaded", "reopen_load"}), pytest.raises(EffectFailed):
            self.actor._fire("finish_load")

    def _fault_without_the_rest(self) -> None:
        """Weights are mapped and hold nothing, the rest is still released."""
        self.actor.sleep()
        backend = self.actor._world.backend
        resume = backend.resume

        def only_weights(region):
            if region != "weights":
                raise Injected
            return resume(region)

        backend.resume = only_weights
        with failing(self.actor, "pause_resumed"), pytest.raises(EffectFailed):
            self.actor.wake_up()
        del backend.resume

    def _fault_half_awake(self) -> None:
        """Weights and rest are mapped and hold nothing, the optimizer is still released, groups are down."""
        self.actor.sleep()
        with failing(self.actor, {"restore_rest", "pause_resumed"}), pytest.raises(EffectFailed):
            self.actor.wake_up("actor" if self.optimizer is None else "ref")


def _run(spec: MachineSpec, row: Row, effect: str, when: str, also: set[str] = frozenset()) -> None:
    case = Case(spec, row, effect)
    actor = case.actor
    with session(actor, case.engine) as sync:
        case.prepare(sync)
        source, expected = actor._machine.state, case.known
        if expected is None and actor.state.name != "FAULTED" and actor.facts.load is None:
            expected = weights_of(actor)
        with failing(actor, {effect, *also}, when) as watch, pytest.raises((LifecycleError, Injected)) as error:
            actor._fire(row.event, **case.arguments)
    assert watch.failed[0] == effect, f"{effect} had nothing to do; it ran {watch.ran}"

    if actor.state.name == "FAULTED":
        _check_faulted(actor, row, error.value)
        if row.event == "close":
            actor.close()
            return
        actor.recover()
    else:
        assert actor._machine.state == source
        assert isinstance(error.value, EffectFailed)
        assert error.value.rolled_back
    if row.event == "adopt":  # what the device holds is still nobody's version, and can still be adopted
        actor.adopt()
    assert broken_contract(actor, spec.state(actor.state.name)) == []
    _check_weights(case, expected)


def _check_faulted(actor, row, error) -> None:
    assert isinstance(error, Faulted if row.event == "recover" else EffectFailed)
    assert actor.state.effect
    with pytest.raises(Faulted, match="recover"):
        actor.sleep()
    with pytest.raises(Faulted):
        actor.permit("forward")


def _check_weights(case: Case, expected) -> None:
    """No tag lost anything. What the failing event itself was making (phase, load, adopted bytes) may differ."""
    actor = case.actor
    got = weights_of(actor)
    if expected is not None:
        own = {
            "abort_training": {"actor"},
            "adopt": {"actor", "ref"},
            "finish_load": {"ref", "old_actor"},
        }.get(case.row.event, set())
        kept = {tag: value for tag, value in expected.items() if tag not in own}
        assert_equal_weights(kept, {tag: got[tag] for tag in kept})
    if actor.state.name == "RESIDENT" and actor.facts.phase is None and actor.facts.load is None:
        case.model.eval()
        assert torch.isfinite(case.model(TOKENS)).all()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("spec", "row", "effect"), CASES)
def test_effect_fails(spec, row, effect, when):
    """The row is undone, or the actor is FAULTED and recovers; no tag loses its weights."""
    _run(spec, row, effect, when)


INVERSES = [
    pytest.param(spec, row, effect, id=f"{spec.name}-{row.event}-{row.source}-{row.match}-{effect}")
    for spec in SPECS
    for row in spec.rows
    for effect in row.effects
    if spec.effect(effect).inverse and (row.event, row.source, effect) not in IDLE
]


@pytest.mark.parametrize(("spec", "row", "effect"), INVERSES)
def test_effect_and_its_inverse_fail(spec, row, effect):
    """With an inverse that fails too the actor is FAULTED, never "the old state, hopefully", and recovers."""
    _run(spec, row, effect, "after", {spec.effect(effect).inverse})


def test_idle_effects_are_declared_ones():
    """The list of effects with nothing to do names real rows, so that it can not hide a renamed one."""
    rows = {(row.event, row.source, effect) for row in ACTOR.rows for effect in row.effects}
    assert {key for key in IDLE if key[0] != "*"} <= rows
