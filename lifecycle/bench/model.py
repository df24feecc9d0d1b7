"""A decoder of Llama's shapes with random weights: as many bytes as asked for, and a forward that reads all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lifecycle.bench.packing import Memory, Shapes, cut, in_layer
from lifecycle.bench.shapes import llama_shapes

_ANYWHERE = Memory()
_SCORED = 256  # tokens whose logits are made: those of all would be larger than the weights


class Block(nn.Module):
    """The weights of one layer, used one after the other around a residual connection.

    There is no attention: what is measured is weights that move, and kernels that read them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``: (tokens, features), bf16; returns the same shape."""
        out = hidden
        for weight in self.parameters():
            out = _used(weight, out)
        return hidden + _fitted(out, hidden.shape[-1])


class Decoder(nn.Module):
    """An embedding, ``layers``, and what comes after them. ``tensors`` by the names that a Llama checkpoint has."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        per_layer: dict[int, dict[str, Tensor]] = {}
        outer: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found = in_layer(name)
            if found:
                per_layer.setdefault(found[0], {})[found[1]] = tensor
            else:
                outer[name] = tensor
        embedding = next(name for name in outer if "embed" in name)
        self.embedding = nn.Parameter(outer.pop(embedding))
        self.layers = nn.ModuleList(Block(per_layer[number]) for number in sorted(per_layer))
        self.last = nn.ParameterList(nn.Parameter(tensor) for tensor in outer.values())

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (tokens,), int64; logits of the last of them, (at most 256, vocabulary), bf16."""
        hidden = functional.embedding(tokens, self.embedding)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden[-_SCORED:]
        for weight in self.last:
            hidden = _used(weight, hidden)
        return hidden


def decoder(nbytes: int, device: torch.device) -> Decoder:
    """One of about ``nbytes`` bytes of bf16."""
    return Decoder(random_weights(llama_shapes(nbytes), device))


def random_weights(shapes: Shapes, device: torch.device, memory: Memory = _ANYWHERE) -> dict[str, Tensor]:
    """bf16 of these shapes, by name, the same each time. Random throughout: zeros would hide missing bytes."""
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for piece in cut(memory.pieces, shapes):
        with memory.region(piece.reserve):
            tensors |= {name: _random(shapes[name], device, generator) for name in piece.names}
    return tensors


def tokens_for(model: Decoder, count: int, seed: int = 0) -> Tensor:
    """(count,) int64, on the model's device."""
    device = model.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(model.embedding.shape[0], (count,), generator=generator, device=device)


def weights_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def change(model: nn.Module) -> None:
    """Move every weight to another value, in place; never back to one it had before.

    The next number of its type, one unit in the last place further from zero.
    """
    with torch.no_grad():
        for bits in _bits(model):
            bits.add_(1)


def _bits(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.view(torch.int16)


def _random(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    mean, spread = (1.0, 0.02) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
    return tensor.normal_(mean, spread, generator=generator)


def _used(weight: Tensor, hidden: Tensor) -> Tensor:
    if weight.dim() == 1:
        return functional.rms_norm(_fitted(hidden, weight.shape[0]), (weight.shape[0],), weight)
    return functional.linear(_fitted(hidden, weight.shape[1]), weight)


def _fitted(hidden: Tensor, features: int) -> Tensor:
    """The features repeated, or cut off, until there are so many."""
    have = hidden.shape[-1]
    if have < features:
        hidden = hidden.repeat(1, -(-features // have))
    return hidden[..., :features]
