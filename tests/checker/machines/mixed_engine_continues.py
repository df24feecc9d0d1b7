"""An update that fails half-way leaves the engine with its old number and half-new weights, and it generates on (F139:
https://github.com/NVIDIA/TensorRT-LLM/pull/16642)."""

from lifecycle.checker.formula import FALSE
from lifecycle.checker.meaning_sync import lent_is_readable
from lifecycle.checker.steps import change
from tests.checker.machines.variants import model


def _send(asked):
    w = asked.words
    for engine in w.of.engines:  # bytes are written in place; the number stays
        yield change([(f"{engine}.sound", FALSE)], w.let(True, "updating", f"{engine}.touched"))
        yield change([(f"{engine}.received", lent_is_readable(w))])


def _abort(asked):
    yield change(asked.words.let(False, "updating"), when=asked.words("updating"))


def _continue_untouched(asked):
    w = asked.words
    for engine in w.of.engines:
        yield change([(f"{engine}.generating", w(f"{engine}.known"))])
    yield change(w.let(False, "held"), when=w("held"))


MACHINE = model(send_weights=_send, abort_updates=_abort, continue_untouched=_continue_untouched)
INVARIANT = "no_mixed_generation"
LENGTH = 4
