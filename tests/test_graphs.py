"""Observing captured CUDA graphs, of a class of ours here; ``tests/gpu/test_graphs_gpu.py`` captures real ones."""

from __future__ import annotations

import gc

import pytest
import torch

from lifecycle import graphs
from lifecycle.graphs import Answer, Observer


def graph_class():
    """A class as torch's: what it captures is a number, and a second capture without a reset fails."""

    class Graph:
        def __init__(self):
            self.holds = None

        def capture_begin(self, pool=None, *, value=1):
            """Begin."""
            if self.holds is not None:
                raise RuntimeError("captured already")
            self.holds = value

        def reset(self):
            self.holds = None

    return Graph


@pytest.fixture(name="graph_class")
def _graph_class():
    return graph_class()


@pytest.fixture
def nothing_frozen():
    """The objects that the suite puts out of the collector's sight are back in it."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_captured_graph_counts_until_it_is_collected(graph_class):
    """Made is not captured; captured counts, with how many in words; the last one gone, the answer is no."""
    observer = Observer(graph_class, earlier=False)
    one, other = graph_class(), graph_class()
    assert observer.captured().answer is Answer.NO

    one.capture_begin()
    other.capture_begin()

    assert observer.captured() == graphs.Captured(Answer.YES, "2 captured CUDA graphs are alive")
    del one
    assert observer.captured().why == "1 captured CUDA graph is alive"
    del other
    assert observer.captured().answer is Answer.NO


def test_a_graph_that_was_reset_no_longer_counts(graph_class):
    """And captured again it counts again."""
    observer = Observer(graph_class, earlier=False)
    graph = graph_class()
    graph.capture_begin()

    graph.reset()
    after_reset = bool(observer.captured())
    graph.capture_begin()

    assert not after_reset
    assert observer.captured()


def test_what_the_methods_do_is_unchanged(graph_class):
    """Arguments and errors pass; names and docstrings stay."""
    Observer(graph_class)
    graph = graph_class()

    graph.capture_begin(None, value=7)

    assert graph.holds == 7
    assert graph_class.capture_begin.__doc__ == "Begin."
    with pytest.raises(RuntimeError, match="captured already"):
        graph.capture_begin()


def test_a_capture_that_does_not_begin_does_not_count(graph_class):
    """Unless the graph held an earlier capture, which it still does."""
    held = graph_class()
    held.holds = 1
    observer = Observer(graph_class, earlier=False)
    captured = graph_class()
    captured.capture_begin()

    for graph in (held, captured):
        with pytest.raises(RuntimeError):
            graph.capture_begin()

    assert observer.captured().why == "1 captured CUDA graph is alive"


def test_a_capture_under_way_counts(graph_class):
    """Another thread may ask between its begin and its end."""
    seen = []
    begin = graph_class.capture_begin
    graph_class.capture_begin = lambda graph: (seen.append(observer.captured().answer), begin(graph))
    observer = Observer(graph_class)

    graph = graph_class()
    graph.capture_begin()

    assert seen == [Answer.YES]


def test_subclasses_are_observed(graph_class):
    """Their captures go through the class that was wrapped."""
    observer = Observer(graph_class)

    class Sub(graph_class):
        def capture_begin(self):
            super().capture_begin(value=2)

    graph = Sub()
    graph.capture_begin()

    assert observer.captured()


@pytest.mark.usefixtures("nothing_frozen")
def test_graphs_from_before_are_found(graph_class):
    """Each counts, as it does not say whether it was captured; those that are gone do not."""
    gone, there = graph_class(), graph_class()
    there.capture_begin()
    del gone

    observer = Observer(graph_class)

    assert observer.captured().why == "1 captured CUDA graph is alive"
    there.reset()
    assert observer.captured().answer is Answer.NO


@pytest.mark.usefixtures("nothing_frozen")
def test_frozen_objects_make_the_answer_unknown(graph_class):
    """A graph that gc.freeze() put away can not be found: unknown, which counts as yes, and says what to do."""
    hidden = graph_class()
    gc.freeze()
    try:
        captured = Observer(graph_class).captured()
    finally:
        gc.unfreeze()

    assert captured.answer is Answer.UNKNOWN
    assert captured
    assert "observe() before gc.freeze()" in captured.why
    assert hidden.holds is None


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        (("capture_begin",), "has no capture_begin to observe"),
        (("capture_begin", "reset"), "has no capture_begin and no reset to observe"),
    ],
)
def test_a_class_without_the_methods_is_unknown(graph_class, lacks, why):
    """A torch that names them otherwise is not taken for one without graphs."""
    for name in lacks:
        delattr(graph_class, name)

    captured = Observer(graph_class).captured()

    assert captured.answer is Answer.UNKNOWN
    assert why in captured.why


def test_a_class_that_can_not_be_changed_is_unknown():
    """One of C++ alone, for which a built-in class stands in: it allows no other methods."""

    class Meta(type):
        def __setattr__(cls, name, value):
            raise TypeError("immutable type")

    class Graph(metaclass=Meta):
        def capture_begin(self): ...

        def reset(self): ...

    captured = Observer(Graph).captured()

    assert captured.answer is Answer.UNKNOWN
    assert captured.why == "Graph can not be observed: immutable type"


def test_a_class_without_weak_references_is_unknown():
    """Counting its graphs would keep them alive."""

    class Graph:
        __slots__ = ()

        def capture_begin(self): ...

        def reset(self): ...

    assert Observer(Graph).captured().why == "Graph allows no weak references"


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_has_no_graphs():
    """Nothing is wrapped there, and the answer is no."""
    begin = torch.cuda.CUDAGraph.capture_begin

    graphs.observe()

    assert graphs.captured() == graphs.Captured(Answer.NO, "this torch has no CUDA")
    assert torch.cuda.CUDAGraph.capture_begin is begin
