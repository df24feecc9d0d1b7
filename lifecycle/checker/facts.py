"""What the facts of the declaration mean in the abstraction: contracts, needs and guards as formulas."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from lifecycle.checker.formula import FALSE, TRUE, Expr, all_of, any_of
from lifecycle.checker.meaning_memory import target_of
from lifecycle.checker.steps import Asked
from lifecycle.checker.words import ACTOR, Words
from states.resources import PROGRESS, Fact

#: Facts that are one bit.
BITS: dict[Fact, str] = {
    Fact.WEIGHTS: "weights",
    Fact.GRADS: "grads",
    Fact.OPTIMIZER: "optimizer",
    Fact.REST: "rest",
    Fact.OPTIMIZER_VALID: "optimizer.valid",
    Fact.OPTIMIZER_ARRIVING: "optimizer.arriving",
    Fact.REST_VALID: "rest.valid",
    Fact.WORKING: "working",
    Fact.GROUPS: "groups",
    Fact.SYNC_GROUPS: "sync_groups",
    Fact.SOURCE_LEASED: "leased",
    Fact.ENGINES_PAUSED: "held",
    Fact.UPDATE_OPEN: "updating",
    Fact.HOOKS: "hooks",
}

#: Facts that others make true at any time.
INPUT_BITS: dict[Fact, tuple[str, ...]] = {
    Fact.SCOPE_OPEN: ("scope",),
    Fact.BACKWARD_LEFT: ("backward_left",),
    Fact.DEVICE_LEASED: ("reading.device",),
    Fact.LEASED: ("reading.device", "reading.host"),
    Fact.MEMORY_SHORT: ("memory_short",),
    Fact.NO_OPTIMIZER: ("no_optimizer",),
}

_KEPT = {
    Fact.WEIGHTS: "weights",
    Fact.GRADS: "grads",
    Fact.OPTIMIZER: "optimizer",
    Fact.REST: "rest",
    Fact.WORKSPACES: "workspaces",
    Fact.OPTIMIZER_VALID: "optimizer",
    Fact.REST_VALID: "rest",
}


def _rotates_shown(asked: Asked) -> Expr:
    if asked.rotate is None or asked.rotate not in (asked.shown, ACTOR):
        return FALSE
    return ~asked.words.same_version(asked.rotate, asked.of or ACTOR)


def _const(value: bool) -> Expr:
    return TRUE if value else FALSE


_GUARDS: dict[Fact, Callable[[Asked], Expr]] = {
    Fact.LOADING: lambda asked: asked.words.loading(),
    Fact.ARRIVING: lambda asked: asked.words.arriving(),
    Fact.HALF_MOVED: lambda asked: any_of(asked.words.half_moved(slot) for slot in asked.words.of.slots),
    # workspaces under captured graphs stay, and are no obstacle
    Fact.WORKSPACES: lambda asked: asked.words("workspaces") & ~asked.words("graphs"),
    Fact.GRAPHS_PIN_ADDRESSES: lambda asked: FALSE if asked.words.of.keeps_addresses else asked.words("graphs"),
    Fact.TAG_IS_ACTOR: lambda asked: _const(asked.tag == ACTOR),
    Fact.TAG_IS_SHOWN: lambda asked: _const(asked.tag == asked.shown),
    Fact.OF_WORKING: lambda asked: asked.words("working") if asked.of == ACTOR else FALSE,
    Fact.ROTATES_SHOWN: _rotates_shown,
    Fact.TARGET_HELD: lambda asked: asked.words.shows(asked.tag or ACTOR),
    Fact.WEIGHTS_LOST: lambda asked: ~asked.words("weights"),
}


def condition(fact: StrEnum, asked: Asked) -> Expr:
    """The fact as a guard or a row's choice sees it. Raises ValueError for one that only contracts use."""
    if not isinstance(fact, Fact):
        return asked.words(f"own.{fact.value}")
    if fact in BITS:
        return asked.words(BITS[fact])
    if fact in INPUT_BITS:
        return any_of(asked.words(name) for name in INPUT_BITS[fact])
    if fact not in _GUARDS:
        raise ValueError(f"{fact.name} is no condition of an event: {fact.value}")
    return _GUARDS[fact](asked)


def _all_copied(w: Words) -> Expr:
    return all_of(w.copied(tag, slot) for tag in w.of.all_tags for slot in w.of.slots)


def _backups_copied(w: Words) -> Expr:
    return all_of(w(f"{region}.copied") for region in w.of.backups if region not in w.of.keep)


def _device_alone(w: Words, tag: str, slot: str) -> Expr:
    return w.device(tag, slot) & ~w.copied(tag, slot)


def _copied_for(effect: str, asked: Asked) -> Expr:
    """What "every referenced part the device may lose has another copy" asks for before this effect."""
    w = asked.words
    if effect in ("open_phase", "restore_weights", "open_load"):
        tags = w.of.tags if effect == "open_phase" else w.of.all_tags
        goes = {slot: ~w.device(target_of(asked), slot) for slot in w.of.slots} if effect == "restore_weights" else {}
        return all_of(~(_device_alone(w, tag, slot) & goes.get(slot, TRUE)) for tag in tags for slot in w.of.slots)
    return _all_copied(w)


def needed(fact: StrEnum, effect: str, asked: Asked) -> Expr:
    """The fact as an effect of this event needs it. Weights of a state that shows nothing are asked for nowhere.

    What an event has done so far follows from the order of its row, which the checks of the declaration prove.
    """
    if fact in PROGRESS:
        return TRUE
    if fact is Fact.VERSION_SHOWN:
        if effect == "remove_hooks":  # by then the device shows the actor, which the effect itself looks at
            return TRUE
        if effect == "restore_optimizer":  # it belongs to the actor's weights, whatever was shown before
            return asked.words.shows(ACTOR)
        return TRUE if asked.shown is None else asked.words.shows(asked.shown) | asked.words.loading()
    if fact is Fact.VERSIONS_COPIED:
        return _copied_for(effect, asked)
    if fact is Fact.BACKUPS_COPIED:
        return _backups_copied(asked.words)
    return condition(fact, asked)


def forbidden(fact: StrEnum, effect: str, asked: Asked) -> Expr:
    """What a fact that must not be means here: for a region that sleeps keep, nothing."""
    kept = isinstance(fact, Fact) and _KEPT.get(fact) in asked.words.of.keep
    return FALSE if kept or fact in PROGRESS else needed(fact, effect, asked)


def contract(holds: frozenset[StrEnum], lacks: frozenset[StrEnum], words: Words, shown: str | None) -> Expr:
    """A state's contract at rest."""
    asked = Asked(words, "", shown=shown)
    return all_of(
        [
            *(needed(fact, "", asked) for fact in sorted(holds)),
            *(~_lacking(fact, asked) for fact in sorted(lacks)),
        ]
    )


def _lacking(fact: StrEnum, asked: Asked) -> Expr:
    if fact is Fact.VERSION_SHOWN:
        w = asked.words
        return any_of(w.device(tag, slot) for tag in w.of.all_tags for slot in w.of.slots)
    return forbidden(fact, "", asked)
