"""Results of methods that are cached by ``functools.lru_cache``: rotary embeddings for each sequence length.

[Note: whose caches] An author who bounds a cache lets any entry be computed again at any time; but a random mask under
``lru_cache`` would be another one afterwards, and nothing tells the two apart. So only classes of families that were
read are taken: their cached methods are functions of their arguments and of buffers that the actor owns. Others
register their own, see ``CachedCalls``. A cache without bound can be a singleton in disguise and is never taken.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.nn import Module

from lifecycle.workspaces.tensors import let_go, nbytes

_FAMILY = "megatron.core"  # RotaryEmbedding.forward, YarnRotaryEmbedding.forward (0.19.2)


class CachedCalls:
    """Cached results of functions or methods wrapped by ``functools.lru_cache``; tensors among the keys count too."""

    def __init__(self, name: str, *functions: Any) -> None:
        wrong = [function for function in functions if not isinstance(function, functools._lru_cache_wrapper)]
        if wrong:
            raise TypeError(f"{name}: {wrong} is not wrapped by functools.lru_cache; give Class.method, not its result")
        self.name = name
        self._functions = functions

    def nbytes(self) -> int:
        return nbytes(_entries(self._functions))

    def drop(self) -> int:
        return let_go(_entries(self._functions), lambda: _clear(self._functions))


class RotaryCaches:
    """Bounded caches of methods of the modules' classes, where the class is of a known family."""

    name = "megatron-core: rotary embeddings"

    def __init__(self, roots: Sequence[Module]) -> None:
        self._roots = tuple(roots)

    def nbytes(self) -> int:
        return nbytes(_entries(self._caches()))

    def drop(self) -> int:
        caches = list(self._caches())
        return let_go(_entries(caches), lambda: _clear(caches))

    def _caches(self) -> Iterator[Any]:
        if _FAMILY not in sys.modules:
            return
        kinds: set[Any] = {type(module) for root in self._roots for module in root.modules()}
        for kind in kinds:
            yield from _bounded(kind)


@functools.cache
def _bounded(kind: type) -> tuple[Any, ...]:
    known = (base for base in kind.__mro__ if base.__module__.startswith(f"{_FAMILY}."))
    methods = [method for base in known for method in vars(base).values()]
    caches = [method for method in methods if isinstance(method, functools._lru_cache_wrapper)]
    return tuple(cache for cache in caches if cache.cache_parameters()["maxsize"] is not None)


def _entries(caches: Iterable[Any]) -> Iterator[object]:
    """What the caches hold: the collector is the only one who can list it."""
    for cache in caches:
        if cache.cache_info().currsize:
            yield from gc.get_referents(cache)


def _clear(caches: Iterable[Any]) -> None:
    for cache in caches:
        cache.cache_clear()
