"""What effects of a sync, of a recovery and of the end do to the facts."""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle.checker.formula import FALSE, TRUE, Assignment, Expr, all_of, any_of
from lifecycle.checker.meaning_memory import target_of
from lifecycle.checker.meaning_training import freeze_version
from lifecycle.checker.steps import Asked, Meaning, Micro, Way, change, note
from lifecycle.checker.words import ACTOR, LENT, WAS, Words

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
    words = ("touched", "known", "sound")  # in this sync, and so this version
    applied = all_of(w(f"{engine}.{word}") for engine in w.of.engines for word in words)
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
    yield from freeze_version(asked)


def _read_back(asked: Asked) -> Iterator[Micro]:
    """Where the facts claim nothing, memory may hold what a tag points at all the same.

    Optimizer state that nobody has taken over is not measured where a copy says what it should be; inside a phase it
    may turn out to be what it was before.
    """
    w = asked.words
    coming = w.arriving() | w("optimizer.arriving")
    yield note(w.let(False, "optimizer.arriving", *(f"arriving.{slot}" for slot in w.of.slots)), when=coming)
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
    """As far as possible, for the actor; what other tags have on the device alone is given up, what is half there is
    put together first.

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


SYNC: dict[str, Meaning] = {
    "lease_source": _lease_source,
    "release_source": _release_source,
    "pause_generation": _pause_generation,
    "continue_untouched": _continue_untouched,
    "send_weights": _send,
    "abort_updates": _abort_updates,
    "end_updates": _end_updates,
    "publish_version": _publish,
    "withdraw_version": _withdraw,
    "rotate_tags": _rotate,
    "rotate_back": _rotate_back,
    "continue_generation": _continue_generation,
    "abandon_sync": _abandon_sync,
    "read_back": _read_back,
    "close_open_business": _close_business,
    "bring_back": _bring_back,
    "remove_hooks": _remove_hooks,
    "free_copies": _free_copies,
}
