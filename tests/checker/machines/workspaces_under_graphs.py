"""Cached quantised weights are dropped though captured graphs replay with their addresses
(https://github.com/radixark/miles/pull/2142)."""

from lifecycle.checker.steps import change
from tests.checker.machines.variants import model


def _drop(asked):
    yield change(asked.words.let(False, "workspaces"), when=asked.words("workspaces"))


MACHINE = model(drop_workspaces=_drop)
INVARIANT = "graphs_stay_valid"
LENGTH = 2
