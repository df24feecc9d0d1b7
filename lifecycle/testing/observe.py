"""Reading a contract's facts off the real world: bytes, mappings and hooks, not the controller's word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from states.resources import SLOT_REGION, VERSION_SLOTS, AnyFact, Fact, Region, Slot
from states.spec import State

if TYPE_CHECKING:
    from lifecycle.controller import ActorLifecycle


def observed(actor: ActorLifecycle) -> dict[AnyFact, bool]:
    """Every fact of a contract that can be seen from outside. Fingerprints are taken anew, but of what is on its way.

    What a machine's own facts are about, only its owner can look at: of them the controller's word is taken.
    """
    world, facts = actor._world, actor.facts
    mapped, coming = world.backend.resident(), world.coming()
    there = [slot for slot in facts.device if SLOT_REGION[slot] in mapped and slot not in coming]
    on_device = {slot: world.backend.fingerprints(slot) for slot in there}

    def valid(slot: Slot, part: int) -> bool:
        found = facts.parts[part]
        if slot in coming:  # nobody can look at it yet
            return SLOT_REGION[slot] in mapped and facts.arriving.get(slot) == part and part in world.buffers
        return facts.device.get(slot) == part and (found.fingerprint is None or on_device[slot] == dict(found.tensors))

    shown = actor._table.shown[actor._machine.state]
    groups = getattr(world.adapter, "groups", True)
    referenced = {part for v in facts.tags.values() for part in facts.versions[v].parts.values()}
    own: dict[AnyFact, bool] = {fact: fact in facts.own for fact in actor._table.spec.own_facts}
    return own | {
        Fact.WEIGHTS: Region.WEIGHTS in mapped,
        Fact.GRADS: world.adapter.grad_bytes() > 0,
        Fact.OPTIMIZER: Region.OPTIMIZER in mapped,
        Fact.WORKSPACES: world.adapter.workspace_bytes() > 0,
        Fact.REST: Region.REST in mapped,
        Fact.VERSION_SHOWN: shown is not None
        and (facts.load is not None or all(valid(s, p) for s, p in facts.version_of(shown).parts.items())),
        Fact.OPTIMIZER_VALID: valid(Slot.OPTIMIZER, facts.backups[Slot.OPTIMIZER]),
        Fact.REST_VALID: Slot.REST not in facts.backups or valid(Slot.REST, facts.backups[Slot.REST]),
        Fact.VERSIONS_COPIED: referenced <= facts.copies.keys(),
        Fact.BACKUPS_COPIED: set(facts.backups.values()) <= facts.copies.keys(),
        Fact.WORKING: facts.phase is not None,
        Fact.LOADING: facts.load is not None,
        Fact.ARRIVING: not coming.isdisjoint(VERSION_SLOTS),
        Fact.OPTIMIZER_ARRIVING: Slot.OPTIMIZER in coming,
        Fact.HALF_MOVED: bool(facts.halves),
        Fact.GROUPS: groups and not facts.sync_groups,
        Fact.SYNC_GROUPS: facts.sync_groups,
        Fact.SOURCE_LEASED: any(lease.reader == "sync" for lease in facts.leases),
        Fact.ENGINES_PAUSED: world.session is not None and bool(world.session.paused - world.session.touched),
        Fact.UPDATE_OPEN: False if world.session is None else world.session.update_open,
        Fact.HOOKS: world.adapter.installed(),
    }


def broken_contract(actor: ActorLifecycle, state: State) -> list[str]:
    """What the state's contract promises and the world does not show. Kept regions are not expected to go."""
    seen = observed(actor)
    kept = {Fact[region.name] for region in actor.config.keep}
    held = [f"{state.name} must hold {fact.name}" for fact in sorted(state.holds) if not seen[fact]]
    return held + [f"{state.name} must lack {fact.name}" for fact in sorted(state.lacks - kept) if seen[fact]]
