"""Whether CUDA graphs were captured: observed, not believed.

A captured graph holds addresses: of weights, and of workspaces that were in use while it was captured. So nothing that
it may read is dropped, and nothing is moved, while one is alive.

Theory of operation. torch does not say which graphs exist, but each begins with ``torch.cuda.CUDAGraph.capture_begin``:
``torch.cuda.graph``, ``make_graphed_callables``, TransformerEngine's version of it and the graph trees of
``torch.compile(mode="reduce-overhead")`` all go through it. ``observe`` wraps that method and ``reset`` once, and keeps
the graphs in a weak set: one that was reset or collected no longer counts. Graphs from before are looked for once,
among the collector's objects. What can not be seen is UNKNOWN, which counts as yes; what is captured by the driver's
interface, past torch, can not be seen at all.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import WeakSet

from attrs import frozen

# gc.freeze() hides every object there is, and importing torch makes far more of them than this. Some Pythons start
# with a few hundred that are frozen already.
_FROZEN_BY_USER = 10_000


class Answer(Enum):
    NO = "no"
    YES = "yes"
    UNKNOWN = "unknown"


@frozen
class Captured:
    """The answer, and why, in words for a journal. As a truth value UNKNOWN counts as yes."""

    answer: Answer
    why: str

    def __bool__(self) -> bool:
        return self.answer is not Answer.NO


class Observer:
    """Watches one class of graphs from when it is made; never taken off, as its wrappers cost microseconds a capture.

    ``earlier`` says whether graphs may have been captured before; then all objects of the process are looked through.
    """

    def __init__(self, graph_class: type, earlier: bool = True) -> None:
        self._live: WeakSet[Any] = WeakSet()
        self._blind = _unobservable(graph_class)
        if self._blind:
            return
        try:
            self._wrap(graph_class)
        except (AttributeError, TypeError) as error:  # a class of C++ alone
            self._blind = f"{graph_class.__name__} can not be observed: {error}"
            return
        if earlier:
            self._blind = self._look_for(graph_class)

    def captured(self) -> Captured:
        alive = len(self._live)
        if alive:
            return Captured(Answer.YES, f"{alive} captured CUDA graph{'s are' if alive > 1 else ' is'} alive")
        if self._blind:
            return Captured(Answer.UNKNOWN, self._blind)
        return Captured(Answer.NO, "no captured CUDA graph is alive")

    def _wrap(self, graph_class: Any) -> None:
        begin, reset = graph_class.capture_begin, graph_class.reset
        graph_class.capture_begin = _marking(begin, self._live)
        graph_class.reset = _unmarking(reset, self._live)

    def _look_for(self, graph_class: type) -> str:
        """Count every graph there is, since one does not say whether it was captured. Returns what hides some."""
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, graph_class)}
        self._live.update(found for found in objects if type(found) in kinds)
        if gc.get_freeze_count() < _FROZEN_BY_USER:
            return ""
        return (
            "objects were frozen (gc.freeze) before CUDA graphs were observed, and a graph among them can not be seen: "
            "call lifecycle.graphs.observe() before gc.freeze()"
        )


_observer: Observer | None = None
_lock = threading.Lock()


def observe() -> None:
    """Begin to observe; again does nothing. Starts no CUDA context, and does nothing where torch has no CUDA."""
    global _observer
    import torch

    with _lock:
        if _observer is None and _has_cuda():
            _observer = Observer(torch.cuda.CUDAGraph, earlier=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def captured() -> Captured:
    """Whether a captured graph is alive in this process; begins to observe if nobody has. Costs microseconds."""
    observe()
    if _observer is None:
        return Captured(Answer.NO, "this torch has no CUDA")
    return _observer.captured()


def _has_cuda() -> bool:
    # Not is_available(): that may start the driver, after which a forked child can not use CUDA.
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def _unobservable(graph_class: Any) -> str:
    name = graph_class.__name__
    missing = [method for method in ("capture_begin", "reset") if not callable(getattr(graph_class, method, None))]
    if missing:
        return f"{name} has no {' and no '.join(missing)} to observe"
    return "" if graph_class.__weakrefoffset__ else f"{name} allows no weak references"


def _marking(begin: Callable[..., Any], live: WeakSet[Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        known = graph in live
        live.add(graph)  # before it begins: another thread may ask while it is being captured
        try:
            return begin(graph, *args, **kwargs)
        except BaseException:
            if not known:
                live.discard(graph)
            raise

    return capture_begin


def _unmarking(reset: Callable[..., Any], live: WeakSet[Any]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def reset_and_forget(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = reset(graph, *args, **kwargs)
        live.discard(graph)
        return result

    return reset_and_forget
