"""A wake behind which a forward runs block by block, beside the wake and then the forward.

The forward is made to take 1.0 to 1.3 times as long as the copy, which is where hiding it matters most: by the number
of tokens, in the run itself. The model is a stack of 32 layers with a small embedding: what comes before the first
layer can not be hidden behind anything, and takes its bytes at the link's speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from lifecycle.bench import peers
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.model import Decoder, tokens_for, weights_bytes
from lifecycle.bench.peers import PLAIN
from lifecycle.bench.result import Accepted, Bar, Group, Result, bar
from lifecycle.bench.subject import Options, Subject, attached, device_here
from lifecycle.bench.timing import Times, Turn, idle, in_turns, timed

_STREAMED, _ORDERED, _WAITED = "ours, streamed", "ours, on the stream", "ours, waited for, then the forward"
_BARE, _FORWARD = "bare resume", "the forward alone"
_AIM, _LEAST, _MOST = 1.15, 1.0, 1.3  # of the forward's time to the copy's
_HIDDEN, _SLACK = 1.06, 0.002
_STACK, _VOCABULARY = 32, 0.125

Found = Mapping[str, Mapping[str, Times]]


@frozen(eq=False)
class _Setup:
    subject: Subject
    tokens: Tensor
    expected: Tensor
    turns: Mapping[str, Turn]
    wrong: list[str]  # a forward after a wake gave other logits


def measure(options: Options) -> Result:
    """Raises RuntimeError when a forward behind a wake gives other logits than the one before the sleep."""
    with attached(options, layers=_STACK, vocabulary_of_hidden=_VOCABULARY) as subject, torch.no_grad():
        setup = _set_up(subject)
        in_turns(setup.turns, 1)
        found = in_turns(setup.turns, options.rounds, options.rest)
        return _result(options, setup, found, _note(setup.wrong))


def _note(wrong: Sequence[str]) -> str:
    """Raises RuntimeError where a forward behind a wake read other weights, as far as a forward can tell."""
    if _FORWARD in wrong:
        return "the forward's logits differ from call to call here, so they prove nothing about the wake"
    if wrong:
        raise RuntimeError(f"the forward read other weights after: {', '.join(sorted(set(wrong)))}")
    return "every forward gave the logits from before the sleep, bit for bit"


def _set_up(subject: Subject) -> _Setup:
    nbytes, device, actor, model = subject.nbytes, device_here(), subject.actor, subject.model
    link = peers.Link(nbytes, device, peers.host_buffer(nbytes))
    tokens = _calibrated(model, link)
    expected = model(tokens).clone()
    wrong: list[str] = []
    out: list[Tensor] = []

    def forward() -> None:
        out[:] = [model(tokens)]

    def check(name: str, step: str) -> None:
        if step == "forward" and not torch.equal(out[0], expected):
            wrong.append(name)

    def waited() -> None:
        actor.wake_up()
        idle()
        forward()

    def ordered() -> None:
        actor.wake_up()
        forward()

    def streamed() -> None:
        actor.wake_up(stream=True)
        forward()

    turns = {
        name: Turn({"forward": run}, actor.sleep, partial(check, name))
        for name, run in ((_STREAMED, streamed), (_ORDERED, ordered), (_WAITED, waited))
    }
    turns["first block"] = Turn({"wake": partial(actor.wake_up, stream=True)}, actor.sleep)
    turns[PLAIN] = Turn({"wake": link.into})
    turns[_BARE] = subject.bare()
    turns[_FORWARD] = Turn({"forward": forward}, each=partial(check, _FORWARD))
    return _Setup(subject, tokens, expected, turns, wrong)


def _calibrated(model: Decoder, link: peers.Link) -> Tensor:
    """As many tokens as make the forward take 1.15 times as long as the copy, as near as five tries come."""
    link.into()
    aim = _AIM * statistics.median(timed(link.into).done for _ in range(3))
    count = 4096 if device_here().type == "cuda" else 16
    for _ in range(5):
        tokens = tokens_for(model, count)
        model(tokens)  # kernels are chosen, and memory taken, for this size
        took = statistics.median(timed(partial(model, tokens)).done for _ in range(3))
        if _LEAST * 1.05 <= took / aim * _AIM <= _MOST * 0.95:
            break
        count = max(16, min(round(count * aim / took), 2**17))
        count -= count % 16
    return tokens


def first_bytes(model: Decoder) -> int:
    """What has to be there when a streamed wake returns: what comes before the layers, and the first of them."""
    return model.embedding.numel() * model.embedding.element_size() + weights_bytes(model.layers[0])


def _result(options: Options, setup: _Setup, found: Found, note: str) -> Result:
    subject = setup.subject
    copy, forward, resume = found[PLAIN]["wake"].done, found[_FORWARD]["forward"].done, found[_BARE]["wake"].done
    first = resume + copy * first_bytes(subject.model) / subject.nbytes
    least = resume + max(copy, forward)
    figures = {
        "weights_bytes": subject.nbytes,
        "first_block_bytes": first_bytes(subject.model),
        "tokens": len(setup.tokens),
        "forward_of_copy": forward / copy,
        "streamed_of_ordered": found[_STREAMED]["forward"].done / found[_ORDERED]["forward"].done,
        "times": {name: {step: one.to_plain() for step, one in steps.items()} for name, steps in found.items()},
    }
    groups = (
        Group("wake and forward", "s", _bars(found), least, f"bare resume + the longer of {PLAIN} and forward"),
        Group(
            "first block ready",
            "s",
            (bar("ours, streamed: the call returns", "ours", found["first block"]["wake"], "", True),),
            first,
            "bare resume + its bytes at the link's speed",
        ),
    )
    accepted: tuple[Accepted, ...] = ()
    if device_here().type == "cuda":
        accepted = _accepted(found, resume + _HIDDEN * max(copy, forward), first + _SLACK, forward / copy)
    settings = {**options.to_plain(), "backend": subject.actor.memory.name}
    notes = (
        "the first block is the embedding and the first layer; what comes after the layers arrives in their middle",
        note,
    )
    return Result("wake", machine_facts(), settings, groups, figures, accepted, (), notes)


def _bars(found: Found) -> tuple[Bar, ...]:
    names = (_STREAMED, _ORDERED, _WAITED)
    return (
        *(bar(name, "ours", found[name]["forward"]) for name in names),
        bar(_FORWARD, "peer", found[_FORWARD]["forward"]),
        bar(PLAIN, "peer", found[PLAIN]["wake"]),
    )


def _accepted(found: Found, whole: float, first: float, forward_of_copy: float) -> tuple[Accepted, ...]:
    streamed = "5: streamed wake and forward, against resume + 1.06 × the longer of copy and forward"
    return (
        Accepted(streamed, "<=", whole, found[_STREAMED]["forward"].done, "s"),
        Accepted(
            "5: first block ready, against resume + its bytes at the link's speed + 2 ms",
            "<=",
            first,
            found["first block"]["wake"].returned,
            "s",
        ),
        Accepted("5: forward, times the copy", ">=", _LEAST, forward_of_copy),
        Accepted("5: forward, times the copy", "<=", _MOST, forward_of_copy),
    )
