"""A small model with something of everything, and how to read, write and step it, for tests that compare two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, Parameter

Tensors = dict[str, Tensor]


class Assorted(Module):
    """Tied weights, two parameters over one storage, a frozen layer, batch statistics, a buffer that no checkpoint
    holds and that every forward changes, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(8)
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.left, self.right = Parameter(both[:4]), Parameter(both[4:])
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.scale = torch.full((4,), 1.5)

    def forward(self, tokens: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        hidden = self.norm(self.embed(tokens)) * self.left + self.right
        logits: Tensor = self.head(torch.tanh(self.frozen(hidden)) * self.scale)
        return logits


class Stacked(Assorted):
    """The same in blocks, which a streamed wake brings one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([self.norm, self.frozen])
        del self.norm, self.frozen

    def forward(self, tokens: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        hidden = self.layers[0](self.embed(tokens)) * self.left + self.right
        logits: Tensor = self.head(torch.tanh(self.layers[1](hidden)) * self.scale)
        return logits


def _present(values: Mapping[str, Tensor | None]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in values.items() if tensor is not None}


@frozen
class Contents:
    """Everything that a subject holds, in tensors of its own."""

    weights: Tensors
    rest: Tensors = field(factory=dict)
    optimizer: Tensors = field(factory=dict)
    grads: Tensors = field(factory=dict)


@frozen(eq=False)
class Subject:
    """A model with its optimizer. ``weights`` and ``rest`` are its own tensors by name, as an actor names them."""

    model: Module
    optimizer: torch.optim.Optimizer
    extra: tuple[str, ...] = ()
    weights: Tensors = field(init=False)
    rest: Tensors = field(init=False)

    def __attrs_post_init__(self) -> None:
        found = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        lasting = self.model.state_dict().keys()
        plain = {path: _attribute(self.model, path) for path in self.extra}
        object.__setattr__(self, "weights", {name: t for name, t in found.items() if name in lasting})
        object.__setattr__(self, "rest", {**{n: t for n, t in found.items() if n not in lasting}, **plain})

    # what it holds

    def contents(self) -> Contents:
        return Contents(_present(self.weights), _present(self.rest), self.optimizer_state(), self.grads())

    def optimizer_state(self) -> Tensors:
        """Tensors by the number of their parameter and their key."""
        return _present(
            {
                f"{number}.{key}": value
                for number, parameter in enumerate(self._stepped())
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
        )

    def grads(self) -> Tensors:
        return _present({name: parameter.grad for name, parameter in self.model.named_parameters()})

    def hold(self, contents: Contents) -> None:
        """Take these contents. Only where nobody controls the subject."""
        with torch.no_grad():
            for name, tensor in (*contents.weights.items(), *contents.rest.items()):
                (self.weights[name] if name in self.weights else self.rest[name]).copy_(tensor)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        stepped = list(self._stepped())
        for name, tensor in contents.optimizer.items():
            number, _, key = name.partition(".")
            state[stepped[int(number)]][key] = tensor.clone()
        self.optimizer.state = state
        for name, parameter in self.model.named_parameters():
            grad = contents.grads.get(name)
            parameter.grad = None if grad is None else grad.clone()

    def _stepped(self) -> Iterable[Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def structure(self) -> dict[str, Any]:
        """Identities, flags, ties and views: what no life cycle may change."""
        tensors = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        tensors |= {path: _attribute(self.model, path) for path in self.extra}
        first: dict[int, tuple[str, int]] = {}
        for name, tensor in tensors.items():
            first.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor.data_ptr()))
        found = {}
        for name, tensor in tensors.items():
            owner, address = first[tensor.untyped_storage().data_ptr()]
            found[name] = (id(tensor), tensor.requires_grad, tensor.stride(), owner, tensor.data_ptr() - address)
        return found

    # what is done with it

    def forward(self, seed: int, train: bool = False) -> Tensor:
        """A loss. In training mode the batch statistics change."""
        self.model.train(train)
        tokens = torch.randint(0, 6, (5,), generator=torch.Generator().manual_seed(seed))
        loss: Tensor = self.model(tokens).square().mean()
        return loss

    def backward(self, seed: int, train: bool = False) -> None:
        self.forward(seed, train).backward()  # type: ignore[no-untyped-call]

    def train_step(self, seed: int) -> None:
        self.backward(seed, train=True)
        self.optimizer.step()


def make_subject(optimizer: str = "adamw", kind: type[Assorted] = Assorted) -> Subject:
    """The same contents every time. ``optimizer``: "adamw" or "sgd" (with momentum)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer == "adamw":
        return Subject(model, torch.optim.AdamW(trained, lr=0.05), ("scale",))
    return Subject(model, torch.optim.SGD(trained, lr=0.05, momentum=0.9), ("scale",))


def _attribute(model: Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found = getattr(model.get_submodule(owner), name)
    assert isinstance(found, Tensor), f"{path} is no tensor"
    return found


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names and, bit for bit, the same values."""
    return one.keys() == other.keys() and all(bits(tensor) == bits(other[name]) for name, tensor in one.items())


def different_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names that only one has, or whose values are not the same bit for bit."""
    missing = [*(one.keys() ^ other.keys())]
    return sorted(missing) + [name for name in one.keys() & other.keys() if bits(one[name]) != bits(other[name])]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
