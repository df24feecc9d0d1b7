"""A machine of one's own as ``docs/extending.md`` declares it, and a judge that shows what has become of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from attrs import define, field
from scenarios import make_actor, make_busy

from lifecycle import EffectCall

PAGE = Path(__file__).parents[1] / "docs/extending.md"
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def _declared() -> ModuleType:
    module = ModuleType("my_machine")
    exec(compile(FILES["my_machine.py"], str(PAGE), "exec"), module.__dict__)
    return module


MODULE = _declared()
MACHINE, EvalFact = MODULE.MACHINE, MODULE.EvalFact


class HalfWay(RuntimeError):
    """A handler stopped in the middle."""


@define
class Judge:
    """``there`` is None, "half" or "whole". ``stop`` names effects that stop half-way."""

    there: str | None = None
    stop: set[str] = field(factory=set)
    told: list[EffectCall] = field(factory=list)

    def perform(self, call: EffectCall) -> int | None:
        self.told.append(call)
        if call.effect in self.stop:
            self.there = "half"
            raise HalfWay(call.effect)
        self.there = "whole" if call.effect == "load_judge" else None
        return 40 if self.there else None

    @property
    def handlers(self):
        return {"load_judge": self.perform, "unload_judge": self.perform}


def make_evaluating(machine=MACHINE, **options):
    """(actor, model, optimizer, judge): busy, as in ``scenarios``."""
    judge = Judge()
    actor, model, optimizer = make_actor(
        machine=machine, perform={**judge.handlers, **options.pop("perform", {})}, **options
    )
    make_busy(actor, model, optimizer)
    return actor, model, optimizer, judge
