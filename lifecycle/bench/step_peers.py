"""What other policies move in a step, really moved: tensors of the same sizes, copied as each policy copies them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen

from lifecycle.bench import formula, peers
from lifecycle.bench.formula import Moved, Step
from lifecycle.bench.model import random_weights
from lifecycle.bench.packing import Shapes
from lifecycle.bench.saver import missing_saver
from lifecycle.bench.shapes import llama_shapes
from lifecycle.bench.timing import idle

_OPTIMIZER = 6  # times the weights: 12 bytes beside each 2


@frozen(eq=False)
class StepPeer:
    """``step`` moves from asleep to asleep what the policy moves; ``least`` is what its formula says it is."""

    step: Callable[[], None]
    least: Moved


def step_peers(
    weights: int, device: torch.device, shown: int, backend: str
) -> tuple[dict[str, StepPeer], tuple[str, ...]]:
    """By the names of ``formula.POLICIES``; ``shown`` sets of weights a step. And what is left out, why."""
    if device.type != "cuda":
        return {}, ("what other policies move is by formula: without CUDA nothing counts their copies",)
    found = {
        formula.EVERY_TIME: _every_time(weights, device, shown, backend),
        formula.NAIVE: _naive(weights, device, shown),
    }
    reason = missing_saver()
    if reason is not None:
        return found, (f"{formula.SAVER}: {reason}",)
    return {**found, formula.SAVER: _saver(weights, device, shown)}, ()


def _shapes(weights: int) -> tuple[Shapes, Shapes]:
    """Of the weights and of what stands for the optimizer's state."""
    return llama_shapes(weights), llama_shapes(_OPTIMIZER * weights)


def _every_time(weights: int, device: torch.device, shown: int, backend: str) -> StepPeer:
    regions = [peers.bare_release(backend, shapes, device) for shapes in _shapes(weights)]
    tensors = [list(region.tensors.values()) for region in regions]
    of_weights, of_optimizer = (peers.TensorCopies(t, peers.host_buffer(peers.host_bytes(t))) for t in tensors)
    for region in regions:
        region.sleep()

    def step() -> None:
        for region in regions:
            region.wake()
        of_optimizer.into()
        for _ in range(shown):
            of_weights.into()
        of_weights.out()
        of_optimizer.out()
        idle()
        for region in regions:
            region.sleep()

    return StepPeer(step, formula.copies_every_time(_step(tensors[0], tensors[1], shown)))


def _saver(weights: int, device: torch.device, shown: int) -> StepPeer:
    pools = [peers.SaverPool(shapes, device, backup=True) for shapes in _shapes(weights)]
    tensors = [list(pool.tensors.values()) for pool in pools]
    copies = peers.TensorCopies(tensors[0], peers.host_buffer(peers.host_bytes(tensors[0])))
    for pool in pools:
        pool.sleep()

    def step() -> None:
        for pool in pools:
            pool.wake()
        for _ in range(shown):
            copies.into()
        copies.out()
        idle()
        for pool in pools:
            pool.sleep()

    return StepPeer(step, formula.saver_backup(_step(tensors[0], tensors[1], shown)))


def _naive(weights: int, device: torch.device, shown: int) -> StepPeer:
    tensors, state = (random_weights(shapes, device) for shapes in _shapes(weights))
    least = formula.naive(_step(list(tensors.values()), list(state.values()), shown))
    model, optimizer = peers.NaiveTo(tensors), peers.NaiveTo(state)
    del tensors, state  # the peers hold them now, and let go of the device's
    for one in (model, optimizer):
        one.sleep()

    def step() -> None:
        for _ in range(shown - 1):
            model.wake()
            model.sleep()
        for one in (model, optimizer):
            one.wake()
        for one in (model, optimizer):
            one.sleep()

    return StepPeer(step, least)


def _step(weights: list[torch.Tensor], optimizer: list[torch.Tensor], shown: int) -> Step:
    return Step(_nbytes(weights), _nbytes(optimizer), shows=tuple(str(number) for number in range(shown)))


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
