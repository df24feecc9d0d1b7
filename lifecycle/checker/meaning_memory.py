"""What effects on memory do to the facts: copying, releasing, taking back, restoring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lifecycle.checker.formula import FALSE, TRUE, Expr, all_of, any_of
from lifecycle.checker.steps import Asked, Meaning, Micro, Way, change, look, note
from lifecycle.checker.words import ACTOR, Words

REGIONS = ("weights", "optimizer", "rest")  # in the order in which they are paused


def target_of(asked: Asked) -> str:
    """The tag whose version the event is to show."""
    if asked.event in ("finish_load", "abort_load"):
        return asked.shown or ACTOR
    return asked.tag or ACTOR


def _looking(asked: Asked) -> Iterable[Micro]:
    return look()


def _nothing(asked: Asked) -> Iterable[Micro]:
    return ()


# copies


def _overwritten(asked: Asked, slot: str) -> Expr:
    """Whether this event overwrites or sends what the device holds in the slot."""
    w, any_held = asked.words, any_of(asked.words.device(r, slot) for r in asked.words.of.references)
    if asked.event == "switch":
        return any_held & ~w.device(target_of(asked), slot)
    if asked.event == "start_sync":
        return w.device(target_of(asked), slot)
    return any_held


def _uncopied(words: Words, tags: Iterable[str], slot: str) -> Expr:
    """Some of these tags has its part on the device alone."""
    return any_of(words.device(tag, slot) & ~words.copied(tag, slot) for tag in tags)


def _copy_out(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    if asked.event == "start_sync" and not asked.host_only:
        return
    wanting = {"begin_training": w.of.tags, "start_sync": (target_of(asked),)}.get(asked.event, w.of.all_tags)
    for slot in w.of.slots:
        wanted = _overwritten(asked, slot) & _uncopied(w, wanting, slot)
        yield note(w.copy_device(slot), when=wanted & ~_exchanged(asked, slot))


def _exchanged(asked: Asked, slot: str) -> Expr:
    """A switch copies it out and its successor in at once, where that has a copy to come from."""
    w = asked.words
    if asked.event != "switch" or not w.of.overlaps:
        return FALSE
    return _overwritten(asked, slot) & _uncopied(w, w.of.all_tags, slot) & w.copied(target_of(asked), slot)


def _exchange(asked: Asked) -> Iterator[Micro]:
    """Half moved from the moment it begins; then its copy is complete, and the device holds the other."""
    w, target = asked.words, target_of(asked)
    for slot in w.of.slots:
        halves = [(f"half.{r}.{slot}", w.half(r, slot) | w.device(r, slot)) for r in w.of.references]
        yield Micro((Way((*halves, *w.lose((slot,)))),), _exchanged(asked, slot), real=True)
        yield note(w.put_together(slot), w.hold(target, slot), when=w.half_moved(slot))


def _put_together(words: Words) -> Iterator[Micro]:
    for slot in words.of.slots:
        yield note(words.put_together(slot), when=words.half_moved(slot))


def _copy_out_loaded(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for slot in w.of.slots:
        stays = w.device(target_of(asked), slot)
        yield note(w.copy_device(slot), when=~stays & _uncopied(w, w.of.all_tags, slot))


def _copy_out_survivors(asked: Asked) -> Iterator[Micro]:
    yield from _put_together(asked.words)
    yield from _copy_out_loaded(asked)


def _copy_out_everything(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    yield from _put_together(w)
    for slot in w.of.slots:
        yield note(w.copy_device(slot), when=_uncopied(w, w.of.all_tags, slot))
    yield from _back_up(asked)


def _back_up(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for region in w.of.backups:
        if region not in w.of.keep:
            yield note(w.let(True, f"{region}.copied"), when=w(f"{region}.valid"))


def _adopt_optimizer_state(asked: Asked) -> Iterator[Micro]:
    """Where optimizer state has appeared, what was copied before is not the whole of it."""
    w = asked.words
    yield Micro((Way(), Way(w.let(False, "optimizer.copied"))), when=w("optimizer.valid"))


def _check_copies(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    versions = all_of(w.readable(tag) for tag in w.of.all_tags)
    backups = all_of(
        w(f"{region}.copied") | (w(f"{region}.valid") if region in w.of.keep else FALSE) for region in w.of.backups
    )
    yield Micro((Way(w.let(False, "given_up")),), succeeds=versions & (w("weights") | backups))


# releasing and taking back


def _drop_workspaces(asked: Asked) -> Iterator[Micro]:
    if "workspaces" not in asked.words.of.keep:
        yield change(asked.words.let(False, "workspaces"), when=asked.words("workspaces") & ~asked.words("graphs"))


def _discard_grads(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    if asked.event == "sleep" and "grads" in w.of.keep:
        return
    wanted = w("backward_left") if asked.event == "sleep" else FALSE
    gone = Way(w.let(False, "grads", "backward_left"))
    yield Micro((gone,), when=w("grads"), sound=~wanted, breaks="gradients_kept", real=True)


def _suspend_groups(asked: Asked) -> Iterator[Micro]:
    yield change(asked.words.let(False, "groups"), when=asked.words("groups"))


def _reload_groups(asked: Asked) -> Iterator[Micro]:
    yield change(asked.words.let(True, "groups"), when=~asked.words("groups"))


def _raise_sync_groups(asked: Asked) -> Iterator[Micro]:
    yield change(asked.words.let(True, "sync_groups"), when=~asked.words("groups"))


def _lower_sync_groups(asked: Asked) -> Iterator[Micro]:
    yield change(asked.words.let(False, "sync_groups"), when=asked.words("sync_groups"))


def pause_region(words: Words, region: str, when: Expr) -> Iterator[Micro]:
    """Contents are lost before the memory is. Pausing what is paused would end the process."""
    lost = words.lose(words.of.slots) if region == "weights" else words.let(False, f"{region}.valid")
    if region == "optimizer":
        lost += words.let(False, "optimizer.arriving")
    if region == "weights":
        yield Micro((Way(),), when, sound=~words("scope"), breaks="scope_stays_awake")
    yield Micro((Way(lost),), when, sound=words(region), breaks="alternation", real=True)
    yield change(words.let(False, region), when=when & words(region))


def resume_region(words: Words, region: str, when: Expr) -> Iterator[Micro]:
    """Mapped, with contents that are worth nothing yet."""
    yield Micro((Way(),), when, sound=~words("memory_short"), breaks="memory_checked")
    yield Micro((Way(words.let(True, region)),), when, sound=~words(region), breaks="alternation", real=True)


def _pause(asked: Asked) -> Iterator[Micro]:
    for region in REGIONS:
        if region not in asked.words.of.keep:
            yield from pause_region(asked.words, region, asked.words(region))


def _pause_resumed(asked: Asked) -> Iterator[Micro]:
    for region in reversed(REGIONS):
        mapped = asked.words(region) & ~asked.words(f"before.{region}")
        yield from pause_region(asked.words, region, mapped)


def _resume(*regions: str) -> Meaning:
    def meaning(asked: Asked) -> Iterator[Micro]:
        for region in regions:
            yield from resume_region(asked.words, region, ~asked.words(region))

    return meaning


def restore_parts(words: Words, reference: str, when: Expr, late: bool = False) -> Iterator[Micro]:
    """Slot by slot, where the device does not hold the part: lost while it is copied, then held, or on its way."""
    for slot in words.of.slots:
        stale = when & ~words.device(reference, slot)
        yield Micro((Way(words.lose((slot,))),), stale, sound=words.copied(reference, slot), real=True)
        coming = words.let(True, f"arriving.{slot}") if late else ()
        yield note(words.hold(reference, slot), coming, when=stale & words.copied(reference, slot))


def restore_backup(words: Words, region: str, when: Expr, late: bool = False) -> Iterator[Micro]:
    stale = when & ~words(f"{region}.valid")
    there = words.let(True, f"{region}.valid", *([f"{region}.arriving"] if late else []))
    yield Micro((Way(there),), stale, sound=words(f"{region}.copied"))


def _comes_later(asked: Asked) -> bool:
    return asked.words.of.stream_ordered and asked.event in ("wake_up", "switch")


def _restore_rest(asked: Asked) -> Iterator[Micro]:
    return restore_backup(asked.words, "rest", TRUE)


def _restore_optimizer(asked: Asked) -> Iterator[Micro]:
    return restore_backup(asked.words, "optimizer", TRUE, _comes_later(asked))


def _restore_weights(asked: Asked) -> Iterator[Micro]:
    return restore_parts(asked.words, target_of(asked), TRUE, _comes_later(asked))


def _await_weights(asked: Asked) -> Iterator[Micro]:
    """Nobody can rely on it while it is looked at, and where it is wrong."""
    w = asked.words
    for slot in w.of.slots:
        yield Micro((Way(w.lose((slot,))),), w(f"arriving.{slot}"), real=True)
        just_lost = ~any_of(w.device(r, slot) for r in w.of.references) & ~w.loading()  # else the state holds it
        yield note(w.hold(asked.shown or ACTOR, slot), when=just_lost)


def _await_optimizer(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    yield Micro((Way(w.let(False, "optimizer.valid", "optimizer.arriving")),), w("optimizer.arriving"), real=True)
    yield note(w.let(True, "optimizer.valid"), when=~w("optimizer.valid"))


def _restore_shown(asked: Asked) -> Iterator[Micro]:
    """What the state showed, in the regions it had."""
    w = asked.words
    yield from _put_together(w)
    if asked.shown is None:
        return
    yield from restore_parts(w, asked.shown, w("weights"))
    for region in w.of.backups:
        yield from restore_backup(w, region, w("weights") & w(region) & w(f"before.{region}"))


def _restore_actor(asked: Asked) -> Iterator[Micro]:
    return restore_parts(asked.words, ACTOR, asked.words("weights"))


def _restore_base(asked: Asked) -> Iterator[Micro]:
    yield from _restore_actor(asked)
    yield from restore_backup(asked.words, "optimizer", asked.words("optimizer"))


MEMORY: dict[str, Meaning] = {
    "settle_writers": _looking,
    "check_structure": _looking,
    "verify_weights": _looking,
    "check_copies": _check_copies,
    "copy_out_weights": _copy_out,
    "adopt_optimizer_state": _adopt_optimizer_state,
    "back_up_regions": _back_up,
    "agree": _nothing,
    "drop_workspaces": _drop_workspaces,
    "discard_grads": _discard_grads,
    "collect_memory": _looking,
    "suspend_groups": _suspend_groups,
    "pause_regions": _pause,
    "resume_actor_regions": _resume("weights", "rest", "optimizer"),
    "resume_forward_regions": _resume("weights", "rest"),
    "pause_resumed": _pause_resumed,
    "reload_groups": _reload_groups,
    "restore_rest": _restore_rest,
    "restore_optimizer": _restore_optimizer,
    "exchange_weights": _exchange,
    "restore_weights": _restore_weights,
    "await_weights": _await_weights,
    "await_optimizer": _await_optimizer,
    "restore_shown": _restore_shown,
    "restore_base": _restore_base,
    "restore_actor": _restore_actor,
    "copy_out_loaded": _copy_out_loaded,
    "raise_sync_groups": _raise_sync_groups,
    "lower_sync_groups": _lower_sync_groups,
    "connect_engines": _looking,
    "flush_caches": _looking,
    "check_engines": _looking,
    "copy_out_survivors": _copy_out_survivors,
    "copy_out_everything": _copy_out_everything,
}
