"""What must be true of every reachable state: each invariant has a name, and what breaking it costs.

A *state invariant* is a premise and a conclusion over the facts, asked after every micro-step or only at rest. The
others are asked of steps: see ``STEPS``.
"""

from __future__ import annotations

from collections.abc import Callable

from lifecycle.checker.facts import BITS
from lifecycle.checker.formula import FALSE, TRUE, Expr, all_of, any_of
from lifecycle.checker.ground import Program
from lifecycle.checker.meaning_sync import lent_is_readable
from lifecycle.checker.steps import Invariant
from lifecycle.checker.words import ACTOR, Words
from states.resources import Fact


def _has_copy(w: Words) -> Expr:
    """'actor' in an open phase says itself that it lives on the device alone; a close gives other tags up."""
    versions = [w.readable(tag) | w("given_up") for tag in w.of.tags] + [w.readable(ACTOR) | w("working")]
    exempt = {"optimizer": w("working")}  # it belongs to the working version, see training_on_the_actor
    backups = [w(f"{one}.valid") | w(f"{one}.copied") | exempt.get(one, FALSE) for one in w.of.backups]
    return all_of([*versions, *backups])


def _readable_source(w: Words) -> Expr:
    on_device = any_of(w.device(r, slot) for r in w.of.references for slot in w.of.slots)
    valid = [~w(f"{region}.valid") | w(region) for region in w.of.backups]
    return all_of([~on_device | w("weights"), *valid])


def _training(w: Words) -> Expr:
    return all_of([w("weights"), w.shows(ACTOR), w("optimizer"), w("optimizer.valid")])


def _engines(w: Words, word: Callable[[str], Expr]) -> Expr:
    return all_of(word(engine) for engine in w.of.engines)


STATES: tuple[Invariant, ...] = (
    Invariant(
        "version_has_copy",
        "A version that a tag points at, the optimizer state or the rest has no valid copy left: it is lost for good.",
        lambda w: w("hooks"),
        _has_copy,
    ),
    Invariant(
        "readable_source",
        "Weights would be read from memory that is released, or that holds something else "
        "(https://github.com/radixark/miles/pull/3128).",
        lambda w: w("hooks"),
        _readable_source,
    ),
    Invariant(
        "lease_stays_readable",
        "What a sync has leased is overwritten or released under it.",
        lambda w: w("leased"),
        lent_is_readable,
        but_in=("FAULTED",),
    ),
    Invariant(
        "reader_undisturbed",
        "What a weights() block reads is overwritten or released under it.",
        lambda w: w("reading.device"),
        lambda w: ~w("torn"),
    ),
    Invariant(
        "training_on_the_actor",
        "A training phase is open while the device does not hold the actor, or the optimizer belongs to other weights: "
        "training would go on with the wrong weight set.",
        lambda w: w("working"),
        _training,
    ),
    Invariant(
        "writers_wait",
        "A phase or a load writes weights while a restore is still bringing its bytes: whatever comes later overwrites "
        "what was written.",
        lambda w: w("working") | w.loading(),
        lambda w: ~w.arriving(),
    ),
    Invariant(
        "no_mixed_generation",
        "An engine generates with a version that it holds in part, or that is not what its number says.",
        lambda w: any_of(w.generating(engine) for engine in w.of.engines),
        lambda w: _engines(w, lambda engine: ~w.generating(engine) | w(f"{engine}.sound")),
    ),
    Invariant(
        "graphs_stay_valid",
        "A captured graph replays with the address of a workspace, or of weights, that was given back.",
        lambda w: w("graphs"),
        lambda w: w("workspaces") & (TRUE if w.of.keeps_addresses else w("weights")),
    ),
    Invariant(
        "sync_groups_down",
        "Process groups that were raised for one sync are still up: their buffers stay on the device for good.",
        lambda w: TRUE,
        lambda w: ~w("sync_groups"),
        at_rest=True,
        but_in=("SYNCING", "FAULTED"),
    ),
)

#: Invariants of steps, which the exploration itself asks.
STEPS: dict[str, str] = {
    "effect_needs_met": "An effect runs where what it needs is not so: it acts on memory or contents that are not "
    "what it takes them for.",
    "effect_keeps_its_word": "An effect ends without what it promises, so whatever relies on it is built on sand.",
    "published_when_applied": "A version counts as published before every engine has acknowledged it: rollouts are "
    "booked under weights that did not make them.",
    "alternation": "Memory is paused twice or resumed twice: torch_memory_saver ends the process there.",
    "tags_move_between_versions": "'actor' is taken off the weights that training made, or a tag points at weights "
    "that a phase is still writing.",
    "close_brings_home": "The life cycle ends with other weights or optimizer state on the device than the actor's: "
    "the owner goes on with the wrong model.",
    "gradients_kept": "A sleep discards gradients that a backward outside any phase has left: the next step would miss "
    "them.",
    "scope_stays_awake": "Memory is released inside a using() or hold() block, which was promised that it stays.",
    "memory_checked": "Memory is mapped without a look at what is free: torch_memory_saver ends the process where it "
    "is not enough.",
    "contract_holds": "The machine rests in a state whose contract is not true.",
    "way_home": "From here no sequence of events leads to the initial or a final state: the actor is stuck.",
    "fault_is_declared": "An effect fails where the table has no row into a fault state.",
}


def state_invariants(program: Program) -> tuple[Invariant, ...]:
    """Those that this machine has the facts for: a machine that holds no weights can not lose any."""
    known = {BITS[fact] for fact in _facts_of(program) if fact in BITS}
    ours = STATES if {"weights", "hooks"} <= known else ()
    return (*ours, *program.model.invariants)


def _facts_of(program: Program) -> set[Fact]:
    spec = program.model.spec
    used = {fact for state in spec.states for fact in state.holds | state.lacks}
    return {fact for fact in used if isinstance(fact, Fact)}


def reason(program: Program, name: str) -> str:
    """What breaking the invariant costs."""
    return STEPS.get(name) or next(one.why for one in state_invariants(program) if one.name == name)
