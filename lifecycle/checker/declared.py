"""The project's own machines, as models that can be checked."""

from __future__ import annotations

from attrs import evolve

from lifecycle.checker.formula import Expr, all_of
from lifecycle.checker.ground import Model
from lifecycle.checker.steps import Invariant
from lifecycle.checker.words import Instance, Words
from lifecycle.load import load
from states.actor import ACTOR
from states.frozen import FROZEN
from states.joint import COLOCATED
from states.rollout import ROLLOUT, EngineFact
from states.spec import MachineSpec


def _own(w: Words, *facts: EngineFact) -> Expr:
    return all_of(w(f"own.{fact.value}") for fact in facts)


#: What an engine promises whoever asks it for tokens.
ENGINE_INVARIANTS = (
    Invariant(
        "no_request_without_version",
        "A request is under way while the engine holds no whole version, or its memory is given back: it generates "
        "with mixed or unknown weights.",
        lambda w: _own(w, EngineFact.REQUESTS),
        lambda w: (
            _own(w, EngineFact.VERSION_HELD, EngineFact.WEIGHTS_IN, EngineFact.KV_IN) & ~_own(w, EngineFact.RECEIVING)
        ),
        but_in=("STOPPED",),
    ),
    Invariant(
        "version_needs_weights",
        "The engine claims a version whose memory it has given back, or is being written over.",
        lambda w: _own(w, EngineFact.VERSION_HELD),
        lambda w: _own(w, EngineFact.WEIGHTS_IN) & ~_own(w, EngineFact.RECEIVING),
    ),
)


#: Frozen weights beside the trained ones make six times as many states; ``--slots 2`` has them.
_ONE_KIND = ("trained",)


def models() -> dict[str, Model]:
    """Every machine that the project declares, by its name."""
    return {
        "actor": Model(ACTOR, Instance(slots=_ONE_KIND)),
        "frozen": Model(FROZEN, Instance(tags=())),
        "rollout": Model(ROLLOUT, Instance(tags=(), engines=(), labels=()), invariants=ENGINE_INVARIANTS),
        "colocated": Model(ACTOR, Instance(tags=("ref",), slots=("trained",), labels=()), joint=COLOCATED),
    }


def find_model(text: str) -> Model:
    """A declared machine by name, or somebody's by MODULE:NAME, a machine or a Model. Raises ValueError."""
    known = models()
    if text in known:
        return known[text]
    if ":" not in text:
        raise ValueError(f"no machine {text!r}: write {', '.join(known)}, or MODULE:NAME for one of your own")
    found = load(text, (MachineSpec, Model))
    if isinstance(found, Model):
        return found
    assert isinstance(found, MachineSpec)
    return Model(found, Instance(slots=_ONE_KIND))


def sized(model: Model, tags: tuple[str, ...] | None, engines: int | None, slots: int | None) -> Model:
    """The model with as many tags beside 'actor', engines and weights slots as asked; None leaves it as it is."""
    one = model.instance
    if tags is not None:
        one = evolve(one, tags=tags)
    if engines is not None:
        one = evolve(one, engines=tuple("abcdefgh"[:engines]))
    if slots is not None:
        one = evolve(one, slots=("frozen", "trained") if slots == 2 else ("trained",))
    return evolve(model, instance=one)
