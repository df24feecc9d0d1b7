"""What it saves to drop quantised weights instead of copying them, and what it costs to make them again.

A stack of TransformerEngine's linear layers in bf16 under ``Float8BlockScaling``, told ``is_first_microbatch``, keeps
as many bytes of quantised weights as it has weights. The peer is a pause that copies both, as one of a memory saver
with backups does: plain page-locked copies of the same tensors, in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from lifecycle.bench import peers
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.memcpy import Copied, copied_during
from lifecycle.bench.model import change
from lifecycle.bench.result import Accepted, Bar, Group, Result, bar
from lifecycle.bench.timing import Times, Took, idle, timed
from lifecycle.controller import ActorLifecycle
from lifecycle.errors import MissingExtra
from lifecycle.workspaces.tensors import leaves, nbytes
from lifecycle.workspaces.transformer_engine import QuantisedWeights

SHAPE = (7168, 8192)  # 112 MiB of bf16; a stack goes there and back
_TOKENS = 2048
_PUBLISHED = 0.45  # of the traffic, by miles for one of its models (its pull request 2142)


def measure(rounds: int = 5, linears: int = 8, shape: tuple[int, int] = SHAPE) -> Result:
    """``linears`` layers of ``shape`` (in, out; both multiples of 128) and back, bf16, with random weights.

    Raises MissingExtra where TransformerEngine is not installed, RuntimeError where the device lacks block scaling.
    """
    te = _transformer_engine()
    # With a gradient wanted, weights are quantised along both directions, as when training.
    hidden = torch.randn(_TOKENS, shape[0], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    found = _Found(Stack(te, linears, shape), hidden)
    with ActorLifecycle(found.model) as actor:
        _forwards(found, rounds)
        _pauses(found, actor, rounds)
        _peer(found, rounds)
    return _result(found, rounds, linears, shape)


class Stack(nn.Module):
    """Layers one after the other, each as quantised as the recipe says. Input (tokens, ``shape[0]``), bf16."""

    def __init__(self, te: Any, linears: int, shape: tuple[int, int]) -> None:
        super().__init__()
        sizes = [shape if number % 2 == 0 else shape[::-1] for number in range(linears)]
        self.layers = nn.ModuleList(te.Linear(*size, bias=False, params_dtype=torch.bfloat16) for size in sizes)
        recipe: Any = import_module("transformer_engine.common.recipe")
        self._quantised = partial(te.autocast, enabled=True, recipe=recipe.Float8BlockScaling())

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None) -> Tensor:
        with self._quantised():
            for layer in self.layers:
                hidden = layer(hidden, is_first_microbatch=is_first_microbatch)
        return hidden


@frozen(eq=False)
class _Found:
    model: Stack
    hidden: Tensor
    times: dict[str, list[Took]] = field(factory=dict)
    given: list[int] = field(factory=list)  # bytes that the driver had more of after a drop
    traffic: dict[str, Copied] = field(factory=dict)
    equal: list[bool] = field(factory=list)

    def add(self, name: str, call: Callable[[], object]) -> None:
        self.times.setdefault(name, []).append(timed(call))

    def of(self, name: str) -> Times:
        return Times(tuple(self.times[name]))

    def quantise(self) -> None:
        self.model(self.hidden, True)

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def quantised(self) -> list[Tensor]:
        return [leaf for module in self.model.layers for leaf in leaves(vars(module)["_fp8_workspaces"])]


def _forwards(found: _Found, rounds: int) -> None:
    """Drop, then the first forward, then one as at the beginning of any step, then one that quantises nothing."""
    model, hidden, dropper = found.model, found.hidden, QuantisedWeights([found.model])
    expected = model(hidden, True).detach()
    for _ in range(rounds):
        idle()
        torch.cuda.empty_cache()
        before, _total = torch.cuda.mem_get_info()
        found.add("drop", dropper.drop)
        torch.cuda.empty_cache()
        found.given.append(torch.cuda.mem_get_info()[0] - before)
        found.equal.append(_same(found, "after a drop", partial(model, hidden, False), expected))
        found.equal.append(_same(found, "first of a step", partial(model, hidden, True), expected))
        found.equal.append(_same(found, "later of a step", partial(model, hidden, False), expected))


def _same(found: _Found, name: str, forward: Callable[[], Tensor], expected: Tensor) -> bool:
    out: list[Tensor] = []
    found.add(name, lambda: out.append(forward()))
    return torch.equal(out[0].detach(), expected)  # its graph, which holds the quantised weights, goes here


def _pauses(found: _Found, actor: ActorLifecycle, rounds: int) -> None:
    """Ours: asleep and awake again with weights that have no other copy, and quantised weights present."""

    def there_and_back() -> None:
        actor.sleep()
        actor.wake_up()
        with actor.hold():  # until all is there
            pass

    def begin() -> None:
        with actor.loading("actor"):
            change(found.model)
        found.quantise()

    begin()
    there_and_back()  # buffers are made
    for _ in range(rounds):
        begin()
        found.add("ours", there_and_back)
    begin()
    found.traffic["ours"] = copied_during(there_and_back)
    found.quantise()


def _peer(found: _Found, rounds: int) -> None:
    """A pause that copies everything, and the part of it that is quantised weights."""
    for name, tensors in (("all", [*found.weights, *found.quantised()]), ("quantised alone", found.quantised())):
        copies = peers.TensorCopies(tensors, peers.host_buffer(peers.host_bytes(tensors)))

        def there_and_back(copies: peers.TensorCopies = copies) -> None:
            copies.out()
            copies.into()

        for _ in range(rounds):
            found.add(name, there_and_back)
        found.traffic[name] = copied_during(there_and_back)


def _result(found: _Found, rounds: int, linears: int, shape: Sequence[int]) -> Result:
    weights = sum(tensor.nbytes for tensor in found.weights)
    workspaces = nbytes(found.quantised())
    saved = 1 - found.traffic["ours"].total / found.traffic["all"].total
    again = found.of("after a drop").done - found.of("first of a step").done
    figures = {
        "weights_bytes": weights,
        "workspaces_bytes": workspaces,
        "given_back_bytes": statistics.median(found.given),
        "share_saved": saved,
        "drop_seconds": found.of("drop").done,
        "rebuild_seconds": again,
        "rebuild_seconds_against_a_later_forward": found.of("after a drop").done - found.of("later of a step").done,
        "traffic": {name: copied.to_plain() for name, copied in found.traffic.items()},
        "times": {name: found.of(name).to_plain() for name in found.times},
        "forwards_equal": all(found.equal),
    }
    return Result(
        bench="workspaces",
        machine=machine_facts(),
        settings={"rounds": rounds, "linears": linears, "shape": list(shape), "tokens": _TOKENS},
        groups=(_traffic(found, weights), _rebuilding(found), _away_and_back(found)),
        figures=figures,
        accepted=_accepted(figures),
    )


def _accepted(figures: Mapping[str, Any]) -> tuple[Accepted, ...]:
    given = figures["given_back_bytes"] / figures["workspaces_bytes"]
    return (
        Accepted("7: share of the traffic saved with workspaces dropped", ">=", _PUBLISHED, figures["share_saved"]),
        Accepted("8: given back at the driver, of the workspaces", ">=", 1.0, given, "times"),
        Accepted("8: forwards after a drop that are bit-identical", ">=", 1.0, float(figures["forwards_equal"])),
    )


def _traffic(found: _Found, weights: int) -> Group:
    bars = (
        Bar("ours: weights copied, workspaces dropped", "ours", [found.traffic["ours"].total]),
        Bar("everything copied", "peer", [found.traffic["all"].total]),
    )
    return Group("bytes of a dirty sleep and wake", "B", bars, 2 * weights, "the weights, once each way")


def _rebuilding(found: _Found) -> Group:
    bars = (
        bar("the first after a drop", "ours", found.of("after a drop")),
        bar("the first of any step", "peer", found.of("first of a step"), "quantises again, in place"),
        bar("a later one of a step", "peer", found.of("later of a step"), "quantises no weight"),
    )
    return Group("a forward", "s", bars)


def _away_and_back(found: _Found) -> Group:
    drops = zip(found.times["drop"], found.times["after a drop"], found.times["later of a step"], strict=True)
    cost = [drop.done + max(0.0, first.done - later.done) for drop, first, later in drops]
    bars = (
        Bar("dropped, and made by the next forward", "ours", cost),
        bar("copied out and in, page-locked", "peer", found.of("quantised alone")),
    )
    return Group("workspaces away and back", "s", bars)


def _transformer_engine() -> Any:
    try:
        return import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # its library may be there and its CUDA not
        raise MissingExtra("lifecycle bench workspaces", "transformer_engine[pytorch]", "transformer-engine") from error
