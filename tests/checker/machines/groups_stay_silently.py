"""Taking groups down fails and is only logged: the next step believes that they are gone (F084:
https://github.com/THUDM/slime/issues/1105)."""

from tests.checker.machines.variants import model

MACHINE = model(suspend_groups=lambda asked: ())
INVARIANT = "effect_keeps_its_word"
LENGTH = 1
