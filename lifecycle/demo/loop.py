"""The main job. Every step: generate while the actor sleeps, score, train, sync, sleep."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from lifecycle.controller import ActorLifecycle
from lifecycle.demo import checks, policy
from lifecycle.demo.models import LanguageModel
from lifecycle.demo.observe import anonymous_bytes, owned_bytes
from lifecycle.demo.options import DemoOptions
from lifecycle.demo.progress import Progress, StepFigures
from lifecycle.demo.tasks import Question, Verdict
from lifecycle.rollout.local import LocalEngine

#: Optimizer steps in each training phase, all on the same answers.
UPDATES = 2


@frozen(eq=False)
class Job:
    """Everything that takes part."""

    options: DemoOptions
    language: LanguageModel
    optimizer: Any
    actor: ActorLifecycle
    engine: LocalEngine
    progress: Progress
    probe: list[int]  # the prompt that tells whether weights are the same

    @property
    def model(self) -> Any:
        return self.language.model


@frozen(eq=False)
class Rollout:
    """A step's answers and their rewards."""

    batch: policy.Batch
    verdicts: tuple[Verdict, ...]
    example: str

    @property
    def rewards(self) -> list[float]:
        return [verdict.reward for verdict in self.verdicts]


def run(job: Job) -> tuple[checks.Check, ...]:
    """All steps, and what they prove. Begins and ends asleep."""
    with job.progress.phase("first sync"):
        job.actor.sync([job.engine])
        logits = probe_logits(job)
        job.actor.sleep()
    equal: list[bool] = []
    for number in range(1, job.options.steps + 1):
        same, logits = step(job, number, logits)
        equal.append(same)
    return finish(job, logits, equal)


def step(job: Job, number: int, logits: Tensor) -> tuple[bool, Tensor]:
    """Whether the logits before the last sleep were the same after it, and those before the next one."""
    seconds: dict[str, float] = {}
    actor, phase, before = job.actor, job.progress.phase, traffic(job.actor)
    with phase("generate", seconds):
        rollout = generate(job, number)
        job.engine.release()
    with phase("reference", seconds):
        actor.wake_up("ref")
        with torch.no_grad():
            reference = policy.log_probs(job.model, rollout.batch, job.language.temperature)
    with phase("switch", seconds):
        actor.switch("actor")
        same = torch.equal(logits, probe_logits(job))
    with phase("train", seconds), actor.training():
        first, owned, after_backward = train(job, rollout, reference)
    with phase("sync", seconds):
        job.engine.resume(("weights",))
        actor.sync([job.engine])
    logits = probe_logits(job)
    with phase("sleep", seconds):
        actor.sleep()
        memory = {"owned": owned, "after_backward": after_backward, "after_sleep": anonymous_bytes()}
        job.engine.resume(("kv_cache",))
    job.progress.add(
        StepFigures(
            number=number,
            version=actor.version("actor").id,
            reward=mean(rollout.rewards),
            correct=mean([verdict.correct for verdict in rollout.verdicts]),
            kl=first.kl,
            loss=first.loss,
            seconds=seconds,
            bytes={name: now - before[name] for name, now in traffic(actor).items()},
            memory=memory,
            example=rollout.example,
        )
    )
    return same, logits


def generate(job: Job, number: int) -> Rollout:
    """The engine answers fresh questions; a program judges the answers."""
    options, language = job.options, job.language
    questions = language.task.questions(options.samples, Random(f"{options.seed}/{number}"))
    prompts = [language.encode(question) for question in questions]
    answers = job.engine.generate(
        prompts,
        max_new_tokens=options.tokens,
        do_sample=True,
        temperature=language.temperature,
        seed=options.seed * 100_003 + number,
        eos_token_id=language.eos,
        pad_token_id=language.pad,
    )
    tokens = [answer["tokens"] for answer in answers]
    verdicts = tuple(judge(job, question, chosen) for question, chosen in zip(questions, tokens, strict=True))
    example = f"{questions[0].user.strip()} {language.decode(tokens[0])}"
    return Rollout(policy.make_batch(prompts, tokens, language.pad), verdicts, example)


def judge(job: Job, question: Question, tokens: Sequence[int]) -> Verdict:
    return job.language.task.judge(question, job.language.decode(tokens), len(tokens) / job.options.tokens)


def train(job: Job, rollout: Rollout, reference: Tensor) -> tuple[policy.Loss, int, int]:
    """The optimizer steps of one phase: the first one's figures, and owned and anonymous bytes after a backward."""
    batch, gain = rollout.batch, policy.advantages(rollout.rewards)
    told: list[policy.Loss] = []
    before = torch.empty(0)
    owned = anonymous = 0
    for update in range(UPDATES):
        job.optimizer.zero_grad()
        now = policy.log_probs(job.model, batch, job.language.temperature)
        before = now.detach() if update == 0 else before
        total, figures = policy.loss(now, before, reference, gain, batch.mask, job.options.kl)
        told.append(figures)
        torch.autograd.backward(total)
        del now, total
        if update == UPDATES - 1:  # by now there is optimizer state
            owned, anonymous = owned_bytes(job.model, job.optimizer), anonymous_bytes()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
    return told[0], owned, anonymous


def finish(job: Job, logits: Tensor, equal: Sequence[bool]) -> tuple[checks.Check, ...]:
    """Wake, look, sleep: the last step's weights answer the same here and in the engine."""
    with job.progress.phase("check"):
        answer = job.engine.generate(
            [job.probe], max_new_tokens=job.options.tokens, eos_token_id=job.language.eos, pad_token_id=job.language.pad
        )[0]
        job.actor.wake_up()
        same = torch.equal(logits, probe_logits(job))
        own = greedy(job)
        job.actor.sleep()
    version = job.actor.version("actor").id
    last = job.progress.steps[-1].memory
    return (
        checks.same_answer(answer["weight_version"], version, answer["tokens"], own),
        checks.same_logits([*equal, same]),
        checks.memory_returned(last["owned"], last["after_backward"], last["after_sleep"]),
        *checks.journal_checks(tuple(job.actor.journal)),
    )


def probe_logits(job: Job) -> Tensor:
    """(prompt length, vocabulary): what the weights that the device holds say to the fixed prompt."""
    with torch.no_grad():
        logits: Tensor = job.model(input_ids=torch.tensor([job.probe]), use_cache=False).logits[0]
    return logits


def greedy(job: Job) -> list[int]:
    """The actor's own greedy answer to the fixed prompt."""
    prompt = torch.tensor([job.probe])
    output = job.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=job.options.tokens,
        eos_token_id=job.language.eos,
        pad_token_id=job.language.pad,
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


def traffic(actor: ActorLifecycle) -> dict[str, int]:
    counted = actor.traffic
    return {name: getattr(counted, name) for name in ("device_to_host", "host_to_device", "avoided")}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
