"""What every effect of the catalogue does to the facts of the abstraction.

This is the checker's own account of ``lifecycle/work.py`` and ``lifecycle/outcome.py``, written so that a search and
other tools can run it; ``tests/checker/test_agreement.py`` compares the two on every reachable state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lifecycle.checker.formula import FALSE, TRUE, Assignment, Bit, Expr, all_of, any_of
from lifecycle.checker.steps import Asked, Meaning, Micro, Way, change, look, note
from lifecycle.checker.words import ACTOR, BASE, LENT, WAS, Words

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
        yield note(w.copy_device(slot), when=_overwritten(asked, slot) & _uncopied(w, wanting, slot))


def _copy_out_loaded(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for slot in w.of.slots:
        stays = w.device(target_of(asked), slot)
        yield note(w.copy_device(slot), when=~stays & _uncopied(w, w.of.all_tags, slot))


def _copy_out_survivors(asked: Asked) -> Iterator[Micro]:
    return _copy_out_loaded(asked)


def _copy_out_everything(asked: Asked) -> Iterator[Micro]:
    w = asked.words
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


def restore_parts(words: Words, reference: str, when: Expr) -> Iterator[Micro]:
    """Slot by slot, where the device does not hold the part: lost while it is copied, then held."""
    for slot in words.of.slots:
        stale = when & ~words.device(reference, slot)
        yield Micro((Way(words.lose((slot,))),), stale, sound=words.copied(reference, slot), real=True)
        yield note(words.hold(reference, slot), when=stale & words.copied(reference, slot))


def restore_backup(words: Words, region: str, when: Expr) -> Iterator[Micro]:
    stale = when & ~words(f"{region}.valid")
    yield Micro((Way(words.let(True, f"{region}.valid")),), stale, sound=words(f"{region}.copied"))


def _restore_backup(region: str) -> Meaning:
    return lambda asked: restore_backup(asked.words, region, TRUE)


def _restore_weights(asked: Asked) -> Iterator[Micro]:
    return restore_parts(asked.words, target_of(asked), TRUE)


def _restore_shown(asked: Asked) -> Iterator[Micro]:
    """What the state showed, in the regions it had."""
    w = asked.words
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


# training


def _zero_grads(asked: Asked) -> Iterator[Micro]:
    yield Micro((Way(), Way(asked.words.let(True, "grads"))), when=~asked.words("grads"))


def _open_phase(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    kept = (*w.point(BASE, ACTOR), *w.let(False, *(f"device.{BASE}.{slot}" for slot in w.of.slots)))
    optimizer = (("base.optimizer.copied", w("optimizer.copied")), ("optimizer.copied", FALSE))
    opened = (*kept, *w.renew(ACTOR, w.of.slots, on_device=True), *optimizer, *w.let(True, "working"), w.disturbed())
    yield Micro((Way(opened),), sound=~w("no_optimizer"), breaks="training_on_the_actor")


def _measured_again(words: Words, name: str, like: str, slots: Iterable[str]) -> list[Assignment]:
    """What the device holds for ``name`` in these slots turns out to be what ``like`` points at."""
    made: list[Assignment] = []
    for slot in slots:
        made += [*words.hold(like, slot), (f"copied.{name}.{slot}", words.copied(like, slot))]
        made += [*words._likened(name, slot, like), *words.let(True, f"device.{name}.{slot}")]
    return made


def _phase_over(words: Words) -> tuple[Assignment, ...]:
    return (*words.forget(BASE), *words.let(False, "working", "base.optimizer.copied"))


def _unchanged(words: Words) -> list[Assignment]:
    labels = words._labels(ACTOR, BASE)
    return [*_measured_again(words, ACTOR, BASE, words.of.slots), *labels]


def _changed(words: Words) -> list[Assignment]:
    """New trained weights; what is frozen is found to be what it was."""
    new, old = words.of.slots[-1:], words.of.slots[:-1]
    return [*_measured_again(words, ACTOR, BASE, old), *words.renew(ACTOR, new, on_device=True)]


def _freeze_version(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    over = (*_phase_over(w), w.disturbed())  # the parts that a reader has leased end with the phase
    yield Micro((Way((*_changed(w), *over)), Way((*_unchanged(w), *over))), when=w("working"))


def _settle_phase(asked: Asked) -> Iterator[Micro]:
    """The weights changed or not, the optimizer stepped or not; back to the base where that is wanted and possible."""
    w = asked.words
    wanted = TRUE if w.of.restore_aborted else FALSE
    weights_back = wanted & w.copied(BASE, w.of.slots[-1])
    optimizer_back = wanted & w("base.optimizer.copied")
    stepped = w.let(False, "optimizer.valid") + w.let(True, "optimizer.copied")
    not_stepped = (("optimizer.copied", w("base.optimizer.copied")),)
    base = (*_based(w), *_phase_over(w))
    ways = (
        Way((*_unchanged(w), *_phase_over(w), *not_stepped)),
        Way((*_unchanged(w), *_phase_over(w), *stepped), optimizer_back),
        Way((*_unchanged(w), *_phase_over(w)), ~optimizer_back),
        Way((*base, *not_stepped), weights_back),
        Way((*base, *stepped), weights_back & optimizer_back),
        Way((*_changed(w), *_phase_over(w)), ~(weights_back & optimizer_back)),
    )
    yield Micro(ways, when=w("working"))


def _based(words: Words) -> list[Assignment]:
    """'actor' points at the base again, and the device holds what is frozen of it alone."""
    new, old = words.of.slots[-1:], words.of.slots[:-1]
    return [*words.point(ACTOR, BASE), *_measured_again(words, ACTOR, BASE, old), *words.lose(new)]


# weights from outside


def _open_load(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    yield note(w.lose(w.of.slots), w.let(True, f"loading.{asked.tag or ACTOR}"))


def _freeze_load(asked: Asked) -> Iterator[Micro]:
    """All is new, or what is frozen is found to be what was shown, or all is."""
    w, tag, shown = asked.words, asked.tag or ACTOR, asked.shown or ACTOR
    opened = w(f"loading.{tag}")
    yield note(w.point(WAS, tag), when=opened)
    new, old = w.of.slots[-1:], w.of.slots[:-1]
    done = w.let(False, f"loading.{tag}")
    equal = (*_measured_again(w, tag, shown, w.of.slots), *w._labels(tag, shown))
    ways = [
        Way((*w.renew(tag, w.of.slots, on_device=True), *done)),
        Way((*_measured_again(w, tag, shown, old), *w.renew(tag, new, on_device=True), *done)),
        Way((*equal, *done)),
    ]
    yield Micro(tuple(dict.fromkeys(ways)), when=opened)


def _reopen_load(asked: Asked) -> Iterator[Micro]:
    """Open again while the device holds what was written; given up where it shows what it showed; else kept."""
    w, tag, shown = asked.words, asked.tag or ACTOR, asked.shown or ACTOR
    again = (*w.point(tag, WAS), *w.lose(w.of.slots), *w.let(True, f"loading.{tag}"))
    as_before = w.shows(WAS if tag == shown else shown)
    ways = (
        Way(again, w.shows(tag)),
        Way(w.point(tag, WAS), ~w.shows(tag) & as_before),
        Way((), ~w.shows(tag) & ~as_before),
    )
    yield Micro(ways, when=~w.loading())


def _drop_load(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    yield note(w.lose(w.of.slots), w.let(False, *(f"loading.{tag}" for tag in w.of.all_tags)), when=w.loading())


def _adopt(asked: Asked) -> Iterator[Micro]:
    """Nothing changed, or the trained weights did; who has lost its only copy by that moves along."""
    w, shown = asked.words, asked.shown or ACTOR
    new = w.of.slots[-1]
    made = [*w.renew(shown, (new,), on_device=True), w.disturbed()]
    for tag in w.of.all_tags:
        if tag != shown:
            follows = w.same_version(shown, tag) & ~w.copied(tag, new)
            made += _point_where(w, tag, shown, follows, new)
    yield Micro((Way(), Way(made)))


def _point_where(words: Words, name: str, at: str, where: Expr, renewed: str) -> list[Assignment]:
    """``name`` goes on pointing at what ``at`` does, where that is so; else it keeps its part off the device."""
    made = [(f"device.{name}.{renewed}", where), (f"copied.{name}.{renewed}", words.copied(name, renewed) & ~where)]
    for other in words.of.references:
        if other != name:
            bit = words.same(name, other, renewed)
            assert isinstance(bit, Bit)
            both = words.same(at, other, renewed) & ~words.copied(other, renewed) & where
            made.append((bit.name, both if other != at else where))
    return [*made, *((key, words(key) & ~where) for key, _ in words._labels(name, None))]


def _move_tag(asked: Asked) -> Iterator[Micro]:
    """'actor' follows training, and what a phase still writes is no version yet."""
    w = asked.words
    allowed = FALSE if asked.tag == ACTOR else ~w("working") if asked.of == ACTOR else TRUE
    moved = Way(w.point(asked.tag or ACTOR, asked.of or ACTOR))
    yield Micro((moved,), sound=allowed, breaks="tags_move_between_versions")


# sync


def _lease_source(asked: Asked) -> Iterator[Micro]:
    w, tag = asked.words, target_of(asked)
    reads = [(f"lent.device.{s}", FALSE if asked.host_only else w.device(tag, s)) for s in w.of.slots]
    found = all_of(w.copied(tag, s) if asked.host_only else w.device(tag, s) | w.copied(tag, s) for s in w.of.slots)
    yield Micro((Way((*w.point(LENT, tag), *reads, *w.let(True, "leased"))),), succeeds=found, sound=found)


def lease_over(words: Words) -> tuple[Assignment, ...]:
    reads = words.let(False, "leased", *(f"lent.device.{slot}" for slot in words.of.slots))
    return (*words.forget(LENT), *reads)


def _release_source(asked: Asked) -> Iterator[Micro]:
    yield note(lease_over(asked.words), when=asked.words("leased"))


def _pause_generation(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for engine in w.of.engines:
        yield change(w.let(False, f"{engine}.generating"), w.let(True, "held"))


def _continue_untouched(asked: Asked) -> Iterator[Micro]:
    """Those that this sync has stopped; one that its owner had stopped before stays so.

    Of several engines it is not known which of them the sync had come to: either may be.
    """
    w = asked.words
    as_it_is = (Way(),) if len(w.of.engines) > 1 else ()
    for engine in w.of.engines:
        stopped = w("held") & ~w(f"{engine}.touched") & ~w(f"{engine}.generating") & w(f"{engine}.known")
        yield Micro((Way(w.let(True, f"{engine}.generating")), *as_it_is), when=stopped, real=True)
    yield change(w.let(False, "held", *(f"{engine}.touched" for engine in w.of.engines)), when=w("held"))


def lost_engine(words: Words, engine: str) -> tuple[Assignment, ...]:
    """It holds no version."""
    has = (f"{engine}.has.{r}" for r in words.labelled)
    return words.let(False, *(f"{engine}.{word}" for word in ("known", "sound", "received", "generating")), *has)


def lent_is_readable(words: Words) -> Expr:
    """Every part is where the lease says, and it is the lent version's."""
    return all_of(
        (words(f"lent.device.{slot}") & words("weights") & words.device(LENT, slot))
        | (~words(f"lent.device.{slot}") & words.copied(LENT, slot))
        for slot in words.of.slots
    )


def _send(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for engine in w.of.engines:
        yield change(lost_engine(w, engine), w.let(True, "updating", f"{engine}.touched"))
        yield change([(f"{engine}.received", lent_is_readable(w))])


def _abort_updates(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for engine in w.of.engines:
        yield change(lost_engine(w, engine), when=w(f"{engine}.touched"))
    yield change(w.let(False, "updating"), when=w("updating"))


def _end_updates(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for engine in w.of.engines:
        has = [(f"{engine}.has.{tag}", w.same_version(LENT, tag)) for tag in w.of.labels]
        taken = ((f"{engine}.sound", w(f"{engine}.received")), (f"{engine}.received", FALSE))
        yield change(has, taken, w.let(True, f"{engine}.known"))
    yield change(w.let(False, "updating"))


def _publish(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    applied = all_of(w(f"{engine}.known") & w(f"{engine}.sound") for engine in w.of.engines)
    labels = tuple((f"published.{tag}", w.same_version(LENT, tag)) for tag in w.of.labels)
    yield Micro((Way(labels),), sound=applied, breaks="published_when_applied")


def _withdraw(asked: Asked) -> Iterator[Micro]:
    """A tag that has rotated, and is not back yet, points at what the actor's label is about."""
    w = asked.words
    made: list[Assignment] = []
    for tag in w.of.labels:
        before = w(f"before.published.{tag}")
        if tag == asked.rotate:
            moved = w("before.tags") & ~w.same_version(tag, WAS)
            actors = w(f"before.published.{ACTOR}") if ACTOR in w.of.labels else FALSE
            made += [(f"published.{tag}", (moved & actors) | (~moved & before)), (f"published.{WAS}", before)]
        else:
            made.append((f"published.{tag}", before))
    yield note(made)


def _rotate(asked: Asked) -> Iterator[Micro]:
    if asked.rotate:
        yield note(asked.words.point(WAS, asked.rotate), asked.words.let(True, "before.tags"))
        to = asked.of or ACTOR
        stays = asked.words.same_version(ACTOR, to) if asked.rotate == ACTOR else TRUE
        moved = Way(asked.words.point(asked.rotate, to))
        yield Micro((moved,), sound=stays, breaks="tags_move_between_versions")


def _rotate_back(asked: Asked) -> Iterator[Micro]:
    if asked.rotate:
        yield note(asked.words.point(asked.rotate, WAS), when=asked.words("before.tags"))


def _continue_generation(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    for engine in w.of.engines:
        yield change([(f"{engine}.generating", w(f"{engine}.known"))])
    yield change(w.let(False, "held"))


# ends


def _abandon_sync(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    over = w.let(False, "held", "updating", *(f"{engine}.touched" for engine in w.of.engines))
    yield note(lease_over(w), over, when=w("leased") | w("held") | w("updating"))


def _close_business(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    yield note(w.let(False, *(f"loading.{tag}" for tag in w.of.all_tags)), when=w.loading())
    yield from _freeze_version(asked)


def _read_back(asked: Asked) -> Iterator[Micro]:
    """Where the facts claim nothing, memory may hold what a tag points at all the same.

    Optimizer state that nobody has taken over is not measured where a copy says what it should be; inside a phase it
    may turn out to be what it was before.
    """
    w = asked.words
    for slot in w.of.slots:
        unknown = w("weights") & ~w("working") & ~any_of(w.device(tag, slot) for tag in w.of.references)
        yield Micro((Way(), *(Way(w.hold(tag, slot)) for tag in w.of.all_tags)), when=unknown)
    for region in w.of.backups:
        valid, copied = w(f"{region}.valid"), w(f"{region}.copied")
        yield Micro((Way(), Way(w.let(True, f"{region}.valid"))), when=w(region) & copied & ~valid)
    if "optimizer" in w.of.backups:
        known = w("optimizer.valid") & w("optimizer.copied") & ~w("working")
        yield Micro((Way(), Way(w.let(False, "optimizer.valid"))), when=known)
        same = w("working") & w("optimizer.valid") & w("base.optimizer.copied") & ~w("optimizer.copied")
        yield Micro((Way(), Way(w.let(True, "optimizer.copied"))), when=same)


def _bring_back(asked: Asked) -> Iterator[Micro]:
    """As far as possible, for the actor; what other tags have on the device alone is given up.

    What it put where is not known, and found out when it is read back, if ever.
    """
    w = asked.words
    kept = [(f"device.{r}.{s}", w.device(r, s) & w.device(ACTOR, s)) for r in w.of.references for s in w.of.slots]
    yield change(kept, w.let(True, "given_up"))
    for name in ("weights", *w.of.backups, "groups"):
        yield Micro((Way(), Way(w.let(True, name))), when=~w(name), real=True)


def _remove_hooks(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    home = all_of([w.shows(ACTOR), *(w(f"{region}.valid") for region in w.of.backups)])
    gone = Way(w.let(False, "hooks"))
    yield Micro((gone,), w("hooks"), sound=home | w("given_up"), breaks="close_brings_home", real=True)


def _free_copies(asked: Asked) -> Iterator[Micro]:
    w = asked.words
    copied = (f"copied.{r}.{s}" for r in w.of.references for s in w.of.slots)
    gone = Way(w.let(False, *copied, "optimizer.copied", "rest.copied"))
    yield Micro((gone,), sound=~w("reading.host"), breaks="reader_undisturbed")


MEANINGS: dict[str, Meaning] = {
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
    "restore_rest": _restore_backup("rest"),
    "restore_optimizer": _restore_backup("optimizer"),
    "restore_weights": _restore_weights,
    "restore_shown": _restore_shown,
    "open_phase": _open_phase,
    "zero_grads": _zero_grads,
    "freeze_version": _freeze_version,
    "settle_phase": _settle_phase,
    "restore_base": _restore_base,
    "restore_actor": _restore_actor,
    "open_load": _open_load,
    "freeze_load": _freeze_load,
    "reopen_load": _reopen_load,
    "copy_out_loaded": _copy_out_loaded,
    "drop_load": _drop_load,
    "adopt_weights": _adopt,
    "move_tag": _move_tag,
    "raise_sync_groups": _raise_sync_groups,
    "lower_sync_groups": _lower_sync_groups,
    "connect_engines": _looking,
    "lease_source": _lease_source,
    "release_source": _release_source,
    "pause_generation": _pause_generation,
    "continue_untouched": _continue_untouched,
    "flush_caches": _looking,
    "send_weights": _send,
    "abort_updates": _abort_updates,
    "check_engines": _looking,
    "end_updates": _end_updates,
    "publish_version": _publish,
    "withdraw_version": _withdraw,
    "rotate_tags": _rotate,
    "rotate_back": _rotate_back,
    "continue_generation": _continue_generation,
    "abandon_sync": _abandon_sync,
    "read_back": _read_back,
    "close_open_business": _close_business,
    "copy_out_survivors": _copy_out_survivors,
    "copy_out_everything": _copy_out_everything,
    "bring_back": _bring_back,
    "remove_hooks": _remove_hooks,
    "free_copies": _free_copies,
}
