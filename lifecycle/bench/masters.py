"""Adam with fp32 masters beside bf16 parameters, as mixed-precision trainers have it, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamWithMasters(torch.optim.Optimizer):
    """Keeps ``master``, ``exp_avg`` and ``exp_avg_sq`` in fp32, 12 bytes per weight, and writes rounded parameters.

    State is made at once, so that it can be allocated inside ``lifecycle.region("optimizer")``; ``steps`` is a number.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                master = parameter.detach().float()
                zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"master": master, **zeros, "steps": 0}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of Adam on the masters. A parameter without a gradient is left alone."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(parameter, self.state[parameter], group)
        return loss


def _step(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    grad, (beta1, beta2) = parameter.grad, group["betas"]
    assert grad is not None
    grad = grad.float()
    state["steps"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = (state["exp_avg_sq"] / (1 - beta2 ** state["steps"])).sqrt_().add_(group["eps"])
    state["master"].addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1 ** state["steps"]))
    parameter.copy_(state["master"])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of all tensors in its state."""
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
