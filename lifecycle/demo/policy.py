"""Policy gradient on sampled answers: log-probabilities, advantages, and one loss. Knows nothing of life cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

_CLIP = 0.2


@frozen(eq=False)
class Batch:
    """Prompts with their answers, padded on the right, so that causal attention needs no mask.

    ``tokens`` (samples, longest) int64. ``chosen`` and ``mask`` (samples, width) are its last columns, from the end of
    the shortest prompt on: the tokens, and 1.0 where a token is part of an answer.
    """

    tokens: Tensor
    chosen: Tensor
    mask: Tensor


@frozen
class Loss:
    """Mean figures of one evaluation of the loss. ``kl`` is per token, in nats."""

    loss: float
    kl: float


def make_batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int) -> Batch:
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest, shortest = max(map(len, rows)), min(map(len, prompts))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    places = torch.arange(longest)
    starts = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    mask = ((places >= starts) & (places < ends)).float()
    return Batch(tokens, tokens[:, shortest:], mask[:, shortest:])


def log_probs(model: Any, batch: Batch, temperature: float) -> Tensor:
    """(samples, width): the log-probability of each chosen token, at the temperature it was sampled with."""
    width = batch.chosen.shape[1]
    logits = model(input_ids=batch.tokens, use_cache=False, logits_to_keep=width + 1).logits[:, :-1] / temperature
    chosen: Tensor = logits.log_softmax(-1).gather(-1, batch.chosen.unsqueeze(-1))
    return chosen.squeeze(-1)


def advantages(rewards: Sequence[float]) -> Tensor:
    """(samples,): rewards less their mean, in units of their deviation; zeros where all are the same."""
    values = torch.tensor(rewards)
    centred = values - values.mean()
    return centred / (centred.square().mean().sqrt() + 1e-6)


def loss(now: Tensor, before: Tensor, reference: Tensor, gain: Tensor, mask: Tensor, kl: float) -> tuple[Tensor, Loss]:
    """Clipped policy gradient plus ``kl`` times the divergence from the reference, averaged over answer tokens.

    All log-probabilities have shape (samples, width). The divergence is estimated as e^d - d - 1 with
    d = reference - now, which is never negative (http://joschu.net/blog/kl-approx.html).
    """
    ratio = (now - before).exp()
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    gained = torch.minimum(ratio * gain.unsqueeze(1), clipped * gain.unsqueeze(1))
    away = reference - now
    divergence = away.exp() - away - 1
    total = _mean(kl * divergence - gained, mask)
    return total, Loss(total.item(), _mean(divergence.detach(), mask).item())


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()
