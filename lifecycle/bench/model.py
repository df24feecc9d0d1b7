"""A decoder of Llama's shapes with random weights: as many bytes as asked for, and a forward that reads all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lifecycle.bench.shapes import LAYERS, VOCABULARY, llama_shapes
from lifecycle.memory.moves import BLOCK

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
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
            found = _LAYER.search(name)
            if found:
                per_layer.setdefault(int(found[1]), {})[found[2]] = tensor
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


def decoder(
    nbytes: int, device: torch.device, seed: int = 0, layers: int = LAYERS, vocabulary_of_hidden: float = VOCABULARY
) -> Decoder:
    """One of about ``nbytes`` bytes of bf16. Allocate it inside ``lifecycle.region("weights")``."""
    return Decoder(random_weights(nbytes, device, seed, layers, vocabulary_of_hidden))


def random_weights(
    nbytes: int, device: torch.device, seed: int = 0, layers: int = LAYERS, vocabulary_of_hidden: float = VOCABULARY
) -> dict[str, Tensor]:
    """Tensors of a decoder, each with memory of its own. Random throughout, since zeros would hide missing bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = llama_shapes(nbytes, layers, vocabulary_of_hidden)
    return {name: _random(shape, device, generator) for name, shape in shapes.items()}


def reserved(
    pieces: str, nbytes: int, layers: int = LAYERS, vocabulary_of_hidden: float = VOCABULARY
) -> tuple[int, ...]:
    """Pieces for ``lifecycle.region(reserve=...)``: of such a model's "layer"s, of all of the "model", or none, for
    which torch takes one per large "tensor". Its allocator cuts whole blocks of 512 bytes."""
    sizes: dict[str, int] = {}
    for name, shape in llama_shapes(nbytes, layers, vocabulary_of_hidden).items():
        layer = _LAYER.search(name)
        owner = "" if pieces == "model" else layer[1] if layer else name
        sizes[owner] = sizes.get(owner, 0) + -(-2 * math.prod(shape) // BLOCK) * BLOCK
    return () if pieces == "tensor" else tuple(size for size in sizes.values() if size >= 1 << 20)


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
