"""What the demo learns from: verifiable tasks, small models, and the policy gradient."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from lifecycle.demo import policy
from lifecycle.demo.models import load
from lifecycle.demo.options import ModelName
from lifecycle.demo.tasks import Letters, Question, Sums

# Tasks


@pytest.mark.parametrize(
    ("answer", "used", "reward", "correct"),
    [
        ("13", 0.125, 0.9375, True),
        ("7 + 6 = 13.", 0.5, 0.75, True),
        ("The sum of 7 and 6 is 13", 1.0, 0.5, True),
        ("13, or maybe 14", 0.5, 0.25, False),
        ("113", 0.25, 0.375, False),
        ("thirteen", 0.125, 0.0, False),
        ("", 0.0, 0.0, False),
    ],
)
def test_sums_are_judged_by_the_last_number(answer: str, used: float, reward: float, correct: bool) -> None:
    """Right is what ends in the very sum; brevity earns something only where a number is said."""
    verdict = Sums().judge(Sums().probe(), answer, used)
    assert verdict.reward == reward
    assert verdict.correct is correct


def test_sums_expect_the_sum() -> None:
    """What the verifier expects is what was asked, and the same seed asks the same."""
    asked = Sums().questions(50, Random(3))
    assert asked == Sums().questions(50, Random(3))
    assert len(set(asked)) > 10
    for question in asked:
        a, b = (int(word) for word in question.user.removeprefix("What is ").removesuffix("?").split(" + "))
        assert question.expected == str(a + b)


@pytest.mark.parametrize(("answer", "reward"), [("abcXYZ", 1.0), ("ab12", 0.5), ("é12 ", 0.0), ("", 0.0)])
def test_letters_are_counted(answer: str, reward: float) -> None:
    """The reward is the share of letters; correct is nothing but letters."""
    verdict = Letters().judge(Letters().probe(), answer, 1.0)
    assert verdict.reward == reward
    assert verdict.correct is (reward == 1.0)


# Model and policy gradient


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load(ModelName.TINY, seed=0)


def test_the_byte_tokenizer_keeps_text(tiny: Any) -> None:
    """Any text comes back from its tokens, one per byte; the special ones are not shown."""
    text = "héllo ∑ 12\n"
    tokens = tiny.encode(Question(text))
    assert len(tokens) == len(text.encode())
    assert tiny.decode([*tokens, tiny.eos, tiny.pad]) == text


def test_tiny_is_the_same_for_the_same_seed(tiny: Any) -> None:
    """The seed decides the weights, and nothing else that is random moves."""
    before = torch.random.get_rng_state()
    again, other = load(ModelName.TINY, seed=0), load(ModelName.TINY, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(tiny.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(tiny.model.lm_head.weight, other.model.lm_head.weight)


def test_padding_changes_no_log_probability(tiny: Any) -> None:
    """Prompts and answers of different lengths in one batch give what each gives alone."""
    prompts, answers = [[5, 6, 7], [8, 9, 10, 11, 12]], [[20, 21, 22, 23], [30]]
    with torch.no_grad():
        batch = policy.make_batch(prompts, answers, tiny.pad)
        together = policy.log_probs(tiny.model, batch, 0.7)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            alone = policy.log_probs(tiny.model, policy.make_batch([prompt], [answer], tiny.pad), 0.7)[0]
            picked = batch.mask[row].bool()
            assert batch.chosen[row][picked].tolist() == answer
            torch.testing.assert_close(together[row][picked], alone)


def test_advantages_are_relative() -> None:
    """Their mean is zero and their deviation one; equal rewards teach nothing."""
    gain = policy.advantages([0.0, 1.0, 0.5, 0.5])
    assert gain.mean().abs() < 1e-6
    assert gain.square().mean() == pytest.approx(1, abs=1e-4)
    assert policy.advantages([0.3, 0.3]).tolist() == [0, 0]


def test_the_first_gradient_is_the_policy_gradient() -> None:
    """At the sampling policy the gradient is minus advantage times mask, over the number of answer tokens."""
    now = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    gain = torch.tensor([1.0, -2.0])
    total, figures = policy.loss(now, now.detach(), now.detach(), gain, mask, kl=0.5)
    total.backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad, -gain.unsqueeze(1) * mask / 4)
    assert figures.kl == 0


def test_the_divergence_pulls_back_to_the_reference() -> None:
    """Without advantage the loss is the divergence alone: positive, and its gradient points to the reference."""
    now = torch.full((1, 2), -1.0, requires_grad=True)
    reference = torch.full((1, 2), -2.0)
    total, figures = policy.loss(now, now.detach(), reference, torch.zeros(1), torch.ones(1, 2), kl=1.0)
    total.backward()
    assert figures.kl > 0
    assert now.grad is not None
    assert (now.grad > 0).all()
