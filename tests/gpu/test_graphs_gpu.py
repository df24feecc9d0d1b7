"""Captured CUDA graphs are observed, however they are captured; while one is alive nothing that it may read goes."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lifecycle import ActorLifecycle, TransitionRefused, graphs, workspaces
from lifecycle.graphs import Answer
from lifecycle.workspaces import Workspace

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

CAPTURE = """
x = torch.ones(8, device="cuda")
x * 2
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
"""


@pytest.fixture(autouse=True)
def observed():
    """Graphs of other tests are gone."""
    graphs.observe()
    gc.collect()


def doubling():
    """A graph that doubles ``x`` into ``y``."""
    x = torch.ones(8, device="cuda")
    x * 2  # kernels are loaded outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    return graph, x, y


def answer_after(*code: str, timeout: float = 180) -> str:
    """The answer in a process of its own, which runs these lines."""
    told = "print(graphs.captured().answer.name)"
    program = "\n".join(("import torch", "from lifecycle import graphs", *code, told))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_captured_graph_counts_and_still_works():
    """From its capture until it is deleted."""
    assert graphs.captured().answer is Answer.NO
    graph, x, y = doubling()

    x.fill_(3.0)
    graph.replay()

    assert y.tolist() == [6.0] * 8
    assert graphs.captured() == graphs.Captured(Answer.YES, "1 captured CUDA graph is alive")
    del graph
    assert graphs.captured().answer is Answer.NO


def test_a_graph_that_was_reset_does_not_count():
    """It holds nothing any more, though it is alive; captured again it counts again."""
    graph, x, _ = doubling()

    graph.reset()
    after_reset = graphs.captured().answer
    with torch.cuda.graph(graph):
        x * 2

    assert after_reset is Answer.NO
    assert graphs.captured().answer is Answer.YES


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (("graphs.observe()",), "NO"),
        (("torch.zeros(1, device='cuda')", "graphs.observe()"), "NO"),
        (("graphs.observe()", CAPTURE), "YES"),
        ((CAPTURE, "graphs.observe()"), "YES"),
        ((CAPTURE, "import gc; gc.freeze()", "graphs.observe()"), "UNKNOWN"),
        (("graphs.observe()", CAPTURE, "import gc; gc.freeze()"), "YES"),
        (("import gc; gc.freeze()", "graphs.observe()"), "NO"),
    ],
    ids=["none", "none yet", "after", "before", "hidden", "frozen later", "frozen without a context"],
)
def test_whether_it_was_captured_before_or_after(code, expected):
    """Those from before are found, unless the collector was told to overlook them."""
    assert answer_after(*code) == expected


def test_graphed_callables_are_observed():
    """torch.cuda.make_graphed_callables captures a forward and a backward."""
    code = """
graphs.observe()
model = torch.nn.Linear(16, 16, device="cuda")
x = torch.randn(4, 16, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(model, (x,))
graphed(x).sum().backward()
"""
    assert answer_after(code) == "YES"


def test_graph_trees_of_compiled_functions_are_observed():
    """torch.compile(mode="reduce-overhead") records after its warm-up, and gives the right result."""
    code = """
graphs.observe()
function = torch.compile(lambda x: (x * 2 + 1).relu(), mode="reduce-overhead")
x = torch.randn(64, 64, device="cuda")
with torch.no_grad():
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = function(x).clone()
torch.cuda.synchronize()
assert torch.allclose(out, (x * 2 + 1).relu())
"""
    assert answer_after(code) == "YES"


def test_workspaces_stay_while_a_graph_is_alive_and_go_afterwards():
    """Where addresses stay a sleep leaves them and the graph replays after the wake; elsewhere it is refused."""
    dropped = []
    dropper = workspaces.register(Workspace("mine", lambda: 7 - 7 * len(dropped), lambda: dropped.append(1) or 7))
    model = nn.Linear(256, 256, bias=False, device="cuda")
    x = torch.randn(8, 256, device="cuda")
    try:
        with ActorLifecycle(model) as actor, torch.no_grad():
            expected = model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x @ model.weight.t()
            if actor.memory.keeps_addresses:
                actor.sleep()
                actor.wake_up()
                y.zero_()
                graph.replay()
                torch.testing.assert_close(y, expected)
            else:
                with pytest.raises(TransitionRefused):
                    actor.sleep()
            assert dropped == []

            del graph
            actor.sleep()
            assert dropped == [1]
            actor.wake_up()
            assert torch.equal(model(x), expected)
    finally:
        workspaces.unregister(dropper)
