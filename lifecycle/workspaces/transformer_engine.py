"""TransformerEngine's workspaces, found on the modules of the model and in its own modules; it is never imported here.

[Note: quantised weights] From 1.8 to 2.20 a module keeps its quantised weights in a dict, ``_fp8_workspaces``, when
its forward is told ``is_first_microbatch``. A forward that finds nothing there quantises the weight anew, whatever it
was told (``get_fp8_workspace`` fills what it makes; in 2.20 ``quantize_weight`` does, and the module keeps the
result), so a cleared dict can be read neither stale nor empty. Nothing else has to be reset. With
``is_first_microbatch=None`` nothing is kept. Before 1.8 the cache was made of attributes (``weight1_fp8``,
``weight1_t_fp8``) that a forward made anew *without filling them* unless it was told that it is the first: those are
left alone, and a warning says so.

[Note: recipe state] ``fp8_meta`` and ``quantizers`` hold scales and amax histories. They are no function of the
weights, so they are not dropped. Nor are they moved: quantizers and TransformerEngine's global buffers hold views of
the same few kilobytes, made when the first forward runs. They stay where they are and live through a sleep untouched.

[Note: preallocated scratch] Newer modules allocate the cuBLAS workspace when they are made, lest the first product run
inside the memory pool of a CUDA graph, whose next graph would take that memory. Dropped, it would be allocated by just
such a product; so where modules do this it stays.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

from lifecycle.workspaces.tensors import leaves, let_go, nbytes

_PACKAGE = "transformer_engine"
_CACHE = re.compile(r"_?(fp8|quantized|quantised|weight)\w*_workspaces?$")
_CACHE_BEFORE_1_8 = re.compile(r"weight\d+_(t_)?fp8$")
_RECIPE_STATE = frozenset({"fp8_meta", "quantizers"})
_GEMM = f"{_PACKAGE}.pytorch.cpp_extensions.gemm"
_BASE = f"{_PACKAGE}.pytorch.module.base"


def left_in_place(module: Module, name: str, value: object) -> bool:
    """Whether this attribute is quantised weights or recipe state, which no region owns, or stands for no bias.

    See the notes above. A bias that is not there is a tensor without elements.
    """
    known = name in _RECIPE_STATE or _CACHE.match(name) is not None
    return (known or (isinstance(value, Tensor) and not value.numel())) and _is_te(module)


class QuantisedWeights:
    """The caches of quantised weights of all modules under the roots. See [Note: quantised weights].

    Warns once for each class of modules that runs quantised and has no such cache: the name may have changed.
    """

    name = "transformer_engine: quantised weights"

    def __init__(self, roots: Sequence[Module]) -> None:
        self._roots = tuple(roots)

    def nbytes(self) -> int:
        return nbytes(self._caches())

    def drop(self) -> int:
        return let_go(self._caches(), self._clear)

    def _clear(self) -> None:
        for cache in list(self._caches()):
            cache.clear()

    def _caches(self) -> Iterator[dict[Any, Any]]:
        for module in _modules(self._roots):
            found = [value for name, value in vars(module).items() if _CACHE.match(name) and _is_cache(value)]
            if not found:
                _warn_if_quantised(module)
            yield from found


class DummyGradients:
    """Stand-ins for weight gradients that were accumulated elsewhere: scratch, made again for the next backward."""

    name = "transformer_engine: dummy weight gradients"

    def nbytes(self) -> int:
        return nbytes([self._cache()])

    def drop(self) -> int:
        cache = self._cache()
        return let_go([cache], cache.clear)

    def _cache(self) -> dict[Any, Any]:
        cache = getattr(sys.modules.get(_BASE), "_dummy_wgrads", None)
        return cache if isinstance(cache, dict) else {}


class CublasWorkspaces:
    """The library's own cuBLAS workspaces, unless modules allocate them in advance. See [Note: preallocated scratch].

    Cached functions in 2.20; before, global variables of the module that has the base class.
    """

    name = "transformer_engine: cuBLAS workspaces"

    def __init__(self, roots: Sequence[Module]) -> None:
        self._roots = tuple(roots)

    def nbytes(self) -> int:
        return nbytes(self._held())

    def drop(self) -> int:
        return let_go(self._held(), self._clear)

    def _held(self) -> Iterator[object]:
        if not self._preallocated():
            for function in _cached_functions():
                yield from gc.get_referents(function)
            base = sys.modules.get(_BASE)
            yield from (getattr(base, name, None) for name in ("_cublas_workspace", "_multi_stream_cublas_workspace"))

    def _clear(self) -> None:
        if self._preallocated():
            return
        for function in _cached_functions():
            function.cache_clear()
        base: Any = sys.modules.get(_BASE)
        if getattr(base, "_cublas_workspace", None) is not None:
            base._cublas_workspace = None
        if isinstance(streams := getattr(base, "_multi_stream_cublas_workspace", None), list):
            streams.clear()

    def _preallocated(self) -> bool:
        return any(hasattr(module, "_prealloc_cublas_workspace") for module in _modules(self._roots))


def _modules(roots: Iterable[Module]) -> Iterator[Module]:
    if _PACKAGE in sys.modules:
        yield from (module for root in roots for module in root.modules() if _is_te(module))


def _is_te(module: Module) -> bool:
    kind: Any = type(module)
    return _is_class_of_te(kind)


@functools.cache
def _is_class_of_te(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == _PACKAGE for base in kind.__mro__)


def _is_cache(value: object) -> bool:
    """A dict in which everything has bytes; an empty one too."""
    return isinstance(value, dict) and all(any(True for _ in leaves(entry)) for entry in value.values())


def _cached_functions() -> list[Any]:
    gemm: ModuleType | None = sys.modules.get(_GEMM)
    functions = vars(gemm).items() if gemm is not None else ()
    return [
        function
        for name, function in functions
        if "workspace" in name and "size" not in name and isinstance(function, functools._lru_cache_wrapper)
    ]


_warned: set[type] = set()


def _warn_if_quantised(module: Module) -> None:
    kind = type(module)
    runs_quantised = getattr(module, "fp8_initialized", False) and not getattr(module, "primary_weights_in_fp8", False)
    if kind in _warned or not runs_quantised or not any(True for _ in module.parameters(recurse=False)):
        return
    _warned.add(kind)
    if any(_CACHE_BEFORE_1_8.match(name) for name in vars(module)):
        why = "its quantised weights are attributes (before 1.8) that it would not fill again, so they are not dropped"
    else:
        why = "no cache of quantised weights was found on it: a private name may have moved, so it is not dropped"
    warnings.warn(f"{_PACKAGE} {_version()}: {kind.__name__} runs quantised, but {why}", RuntimeWarning, stacklevel=2)


def _version() -> str:
    for distribution in ("transformer_engine", "transformer_engine_torch"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "(unknown version)"
