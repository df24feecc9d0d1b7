"""What effects of training and of weights from outside do to the facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lifecycle.checker.formula import FALSE, TRUE, Assignment, Bit, Expr
from lifecycle.checker.steps import Asked, Meaning, Micro, Way, note
from lifecycle.checker.words import ACTOR, BASE, WAS, Words

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
        made += [*words.likened(name, slot, like), *words.let(True, f"device.{name}.{slot}")]
    return made


def _phase_over(words: Words) -> tuple[Assignment, ...]:
    return (*words.forget(BASE), *words.let(False, "working", "base.optimizer.copied"))


def _unchanged(words: Words) -> list[Assignment]:
    labels = words.labels_like(ACTOR, BASE)
    return [*_measured_again(words, ACTOR, BASE, words.of.slots), *labels]


def _changed(words: Words) -> list[Assignment]:
    """New trained weights; what is frozen is found to be what it was."""
    new, old = words.of.slots[-1:], words.of.slots[:-1]
    return [*_measured_again(words, ACTOR, BASE, old), *words.renew(ACTOR, new, on_device=True)]


def freeze_version(asked: Asked) -> Iterator[Micro]:
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
    yield note(w.hand_over(w.of.slots), w.let(True, f"loading.{asked.tag or ACTOR}"))


def _freeze_load(asked: Asked) -> Iterator[Micro]:
    """All is new, or what is frozen is found to be what was shown, or all is."""
    w, tag, shown = asked.words, asked.tag or ACTOR, asked.shown or ACTOR
    opened = w(f"loading.{tag}")
    yield note(w.point(WAS, tag), when=opened)
    new, old = w.of.slots[-1:], w.of.slots[:-1]
    done = w.let(False, f"loading.{tag}")
    equal = (*_measured_again(w, tag, shown, w.of.slots), *w.labels_like(tag, shown))
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
    follows = {
        tag: w.same_version(shown, tag) & ~w.copied(tag, new) if tag in w.of.all_tags else FALSE
        for tag in w.of.references
        if tag != shown
    }
    made = [*w.renew(shown, (new,), on_device=True), w.disturbed()]
    for tag in w.of.all_tags:
        if tag != shown:
            made += _follow(w, tag, shown, follows, new)
    yield Micro((Way(), Way(made)))


def _follow(words: Words, name: str, at: str, follows: dict[str, Expr], slot: str) -> list[Assignment]:
    """``name`` goes on pointing at what ``at`` does, where that is so; else it keeps its part off the device."""
    where = follows[name]
    made = [(f"device.{name}.{slot}", where), (f"copied.{name}.{slot}", words.copied(name, slot) & ~where)]
    for other in words.of.references:
        if other != name:
            bit = words.same(name, other, slot)
            assert isinstance(bit, Bit)
            both = where if other == at else where & follows[other] | ~where & ~follows[other] & bit
            made.append((bit.name, both))
    return [*made, *((key, words(key) & ~where) for key, _ in words.labels_like(name, None))]


def _move_tag(asked: Asked) -> Iterator[Micro]:
    """'actor' follows training, and what a phase still writes is no version yet."""
    w = asked.words
    allowed = FALSE if asked.tag == ACTOR else ~w("working") if asked.of == ACTOR else TRUE
    moved = Way(w.point(asked.tag or ACTOR, asked.of or ACTOR))
    yield Micro((moved,), sound=allowed, breaks="tags_move_between_versions")


TRAINING: dict[str, Meaning] = {
    "open_phase": _open_phase,
    "zero_grads": _zero_grads,
    "freeze_version": freeze_version,
    "settle_phase": _settle_phase,
    "open_load": _open_load,
    "freeze_load": _freeze_load,
    "reopen_load": _reopen_load,
    "drop_load": _drop_load,
    "adopt_weights": _adopt,
    "move_tag": _move_tag,
}
