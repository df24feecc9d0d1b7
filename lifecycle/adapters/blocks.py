"""How a model is cut into the blocks of a streamed wake: a module with its whole subtree, as FSDP wraps layers.

Hooks on leaves would miss modules that read a child's weights without calling it, such as ``nn.MultiheadAttention``;
so a block is a whole layer, an element of an outermost ``ModuleList``, and whatever comes before the layers is there
with the first of them, before any forward.

[Note: what comes after the layers] The last norm and the head are needed last, and their bytes are many; but losses
read a head's weights without calling it. So they come with the layer in the middle, and every layer from there on waits
for that block too, as some may be skipped: no forward gets past the layers without having called one that waits for
them. Modules of them that are called by themselves wait as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from attrs import frozen
from torch.nn import Module, ModuleList, Sequential

Path = tuple[str, Module]


@frozen(eq=False)
class Cut:
    """``names``: of weights, by block in the order of arrival; what none names comes with the first. None: not cut.

    ``waits``: for modules that may not be called before a later block is there, its number.
    """

    names: tuple[frozenset[str], ...] = ()
    waits: tuple[tuple[int, Module], ...] = ()


def cut(roots: Sequence[Path]) -> Cut:
    """Of the modules with these prefixes. Not cut where there are not two layers, or code runs without its hooks."""
    modules = [pair for prefix, root in roots for pair in root.named_modules(prefix=prefix, remove_duplicate=False)]
    layers = list(_layers(roots, ModuleList)) or list(_layers(roots, Sequential))
    if len(layers) < 2 or any(compiled(module) for _, module in modules):
        return Cut()
    at = {path: place for place, (path, _) in enumerate(modules)}
    inside = [range(at[path], at[path] + _size(layer)) for path, layer in layers]  # a subtree is listed in one piece
    after = range(inside[-1].stop, len(modules))
    names = [_names(modules[place] for place in places) for places in inside]
    middle = len(layers) // 2  # see [Note: what comes after the layers]
    waits = [(number, place) for number, places in enumerate(inside) if number for place in places]
    if rest := _names(modules[place] for place in after):
        names[middle] |= rest
        waits += [(middle, place) for places in (*inside[middle + 1 :], after) for place in places]
    # what reads nothing waits for nothing: an activation that all layers share would have the first wait for the last
    reads = {place: _reads(modules[place][1]) for _, place in waits}
    return Cut(tuple(names), tuple((number, modules[place][1]) for number, place in waits if reads[place]))


def _layers(roots: Iterable[Path], kind: type[Module]) -> Iterator[Path]:
    """The children that have weights, of outermost modules of this kind, in the order of registration."""
    for path, module in roots:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if isinstance(module, kind) and any(True for _ in child.parameters()):
                yield inner, child
            else:
                yield from _layers([(inner, child)], kind)


def _size(module: Module) -> int:
    return sum(1 for _ in module.named_modules(remove_duplicate=False))


def _names(modules: Iterable[Path]) -> frozenset[str]:
    """Parameters and buffers of the modules themselves."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in modules
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    )


def _reads(module: Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))


def compiled(module: Module) -> bool:
    """Whether a call of it runs code that was compiled without its hooks."""
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module, "_orig_mod")  # what torch.compile(module) returns
