"""Generation with a causal language model of transformers, watched between any two tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, fields, frozen
from attrs.validators import ge, gt, in_, instance_of, le, optional
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

FROM_CONFIG = "config"

# Without annotations of their own.
_model_from_config: Any = AutoModelForCausalLM.from_config
_GenerationConfig: Any = GenerationConfig


def _as_ids(value: Any) -> Any:
    """None: never stop; an integer or several: stop there; ``"config"``: what the model's config says."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value


def _ids_or_config(_: object, attribute: Any, value: Any) -> None:
    if value != FROM_CONFIG and not (isinstance(value, tuple) and all(isinstance(item, int) for item in value)):
        raise ValueError(f"{attribute.name} must be token ids, None or {FROM_CONFIG!r}, not {value!r}")


_NUMBER = instance_of((int, float))


@frozen(kw_only=True)
class GenerationOptions:
    """What ``generate`` can be asked. The defaults are greedy; sampling is from the whole distribution."""

    max_new_tokens: int = field(default=16, validator=[instance_of(int), ge(1)])
    do_sample: bool = field(default=False, validator=instance_of(bool))
    temperature: float = field(default=1.0, validator=[_NUMBER, gt(0)])
    top_p: float = field(default=1.0, validator=[_NUMBER, gt(0), le(1)])
    top_k: int = field(default=0, validator=[instance_of(int), ge(0)])
    seed: int | None = field(default=None, validator=optional(instance_of(int)))
    eos_token_id: Any = field(default=FROM_CONFIG, converter=_as_ids, validator=_ids_or_config)
    pad_token_id: int | None = field(default=None, validator=optional(instance_of(int)))
    logprobs: bool = field(default=False, validator=in_((True, False)))

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> GenerationOptions:
        """Raises ValueError or TypeError naming what is wrong."""
        known = [attribute.name for attribute in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**options)


def build_model(config: Mapping[str, Any], dtype: str, attention: str | None = None) -> Any:
    """A model of ``config`` (``PretrainedConfig.to_dict()``) with random weights, in evaluation mode.

    Only architectures that transformers itself has: no code is loaded from anywhere. Raises ValueError otherwise.
    """
    element = getattr(torch, dtype, None)
    if not isinstance(element, torch.dtype) or not element.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is not a floating-point type of torch")
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    if "model_type" not in plain:
        raise ValueError("the config has no model_type")
    chosen = {} if attention is None else {"attn_implementation": attention}
    built = AutoConfig.for_model(**plain)
    model = _model_from_config(built, dtype=element, trust_remote_code=False, **chosen)
    return model.eval().requires_grad_(False)


class _Raw(LogitsProcessor):
    """Keeps the distribution of the next token as the model gave it: ours runs before temperature and top-p."""

    def __init__(self) -> None:
        self.logprobs = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logprobs = scores.float().log_softmax(-1)
        return scores


class _Watch(StoppingCriteria):
    """Runs between two tokens: notes the log-probability of the last one, and asks whether to go on."""

    def __init__(self, raw: _Raw | None, at_token: Callable[[], bool]) -> None:
        self._raw, self._at_token = raw, at_token
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self._raw is not None:
            self.logprobs.append(self._raw.logprobs.gather(1, input_ids[:, -1:]).squeeze(1))
        return torch.full((input_ids.shape[0],), self._at_token(), dtype=torch.bool, device=input_ids.device)


class Generator:
    """Turns prompts into answers. One call at a time."""

    def __init__(self, model: Any, *, seed: int = 0) -> None:
        self._model = model
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._eos = _as_ids(model.generation_config.eos_token_id)
        self._pad = model.generation_config.pad_token_id
        # What is asked is all there is: nothing of the model's own generation settings may join in.
        model.generation_config = _GenerationConfig()
        torch.manual_seed(seed)

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for a prompt that is empty or has a token outside the vocabulary."""
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty")
            outside = [token for token in prompt if not 0 <= token < self._vocabulary]
            if outside:
                raise ValueError(f"prompt {index} has token {outside[0]}, the vocabulary has {self._vocabulary}")

    def generate(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions, at_token: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """One answer per prompt: ``tokens``, ``finish_reason``, and ``logprobs`` where asked. See LocalEngine.generate.

        ``at_token`` is called after every token; when it says True, what is there so far is the answer.
        """
        if not prompts:
            return []
        eos = self._eos if options.eos_token_id == FROM_CONFIG else options.eos_token_id
        pad = next((token for token in (options.pad_token_id, self._pad, *eos) if token is not None), 0)
        tokens, mask = _left_padded(prompts, pad)
        raw = _Raw() if options.logprobs else None
        watch = _Watch(raw, at_token)
        with _seeded(options.seed):
            output = self._model.generate(
                input_ids=tokens,
                attention_mask=mask,
                generation_config=_settings(options, eos, pad),
                logits_processor=LogitsProcessorList([raw] if raw is not None else []),
                stopping_criteria=StoppingCriteriaList([watch]),
            )
        rows = output[:, tokens.shape[1] :].tolist()
        logprobs = torch.stack(watch.logprobs, 1).tolist() if raw is not None else [None] * len(rows)
        return [_answer(row, chosen, eos, options.max_new_tokens) for row, chosen in zip(rows, logprobs, strict=True)]


def _left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 of shape (prompts, longest prompt)."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def _settings(options: GenerationOptions, eos: tuple[int, ...], pad: int) -> Any:
    sampling = {"temperature": float(options.temperature), "top_p": float(options.top_p), "top_k": options.top_k}
    return _GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.do_sample,
        eos_token_id=list(eos) or None,
        pad_token_id=pad,
        **(sampling if options.do_sample else {}),
    )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """A request's own seed must not move the random numbers of the others."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _answer(row: list[int], logprobs: list[float] | None, eos: tuple[int, ...], max_new_tokens: int) -> dict[str, Any]:
    """A row of a batch goes on with padding after its end of sequence; the answer does not."""
    end = next((index + 1 for index, token in enumerate(row) if token in eos), None)
    tokens = row[:end]
    reason = "stop" if end is not None else "length" if len(tokens) == max_new_tokens else "abort"
    answer = {"tokens": tokens, "finish_reason": reason}
    return answer if logprobs is None else {**answer, "logprobs": logprobs[:end]}
