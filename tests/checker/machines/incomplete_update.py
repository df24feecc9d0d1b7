"""An engine takes the number though names did not come, and nobody compares (F019, F039:
https://github.com/NovaSky-AI/SkyRL/pull/1737)."""

from lifecycle.checker.formula import FALSE
from lifecycle.checker.meaning_sync import lost_engine
from lifecycle.checker.steps import change
from tests.checker.machines.variants import model


def _send(asked):
    w = asked.words
    for engine in w.of.engines:
        yield change(lost_engine(w, engine), w.let(True, "updating", f"{engine}.touched"))
        yield change([(f"{engine}.received", FALSE)])


MACHINE = model(send_weights=_send)
INVARIANT = "published_when_applied"
LENGTH = 2
