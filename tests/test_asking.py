"""Questions to the world are asked once for as long as nothing is done to it, and again afterwards."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from lifecycle import ActorLifecycle
from lifecycle.asking import asked_once
from states.resources import Slot


class Counting:
    """Answers with how often it was asked, in all."""

    def __init__(self):
        self.heard = Counter()

    def grad_bytes(self):
        self.heard["grads"] += 1
        return self.heard.total()

    def nbytes(self, slot):
        self.heard[slot] += 1
        return self.heard.total()


def test_the_same_question_is_asked_once():
    """About different slots it is another one; a new asker knows nothing of what an earlier one was told."""
    probe = Counting()
    asked = asked_once(probe)

    first = [asked.grad_bytes(), asked.nbytes(Slot.REST), asked.nbytes(Slot.FROZEN)]
    again = [asked.nbytes(Slot.FROZEN), asked.nbytes(Slot.REST), asked.grad_bytes()]

    assert (first, again) == ([1, 2, 3], [3, 2, 1])
    assert asked_once(probe).grad_bytes() == 4


def test_what_an_effect_changed_is_asked_again(monkeypatch):
    """A gradient that came after the plan was made, while writers were settled, is discarded all the same."""
    model = nn.Linear(4, 4)

    def written():
        model.weight.grad = torch.ones(4, 4)

    with ActorLifecycle(model) as actor:
        planned = [effect.name for effect in actor.plan("sleep").effects]
        monkeypatch.setitem(actor._world._perform, "settle", lambda *_: (written(), 0))

        actor.sleep()

        ran = [record.effect for record in actor.journal if record.kind == "effect"]
        assert model.weight.grad is None
        assert "discard_grads" not in planned
        assert "discard_grads" in ran
