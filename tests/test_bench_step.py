"""The traffic of a step: the formula against a search, ours against the formula, the documentation against both."""

from __future__ import annotations

import heapq
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lifecycle.bench import formula, step_peers
from lifecycle.bench.formula import Step, minimum
from lifecycle.bench.masters import AdamWithMasters, state_bytes
from lifecycle.bench.memcpy import SMALL, Copied, count
from lifecycle.bench.model import Decoder, change, decoder, random_weights, tokens_for, weights_bytes
from lifecycle.bench.peers import TensorCopies, host_buffer, host_bytes
from lifecycle.bench.shapes import llama_shapes
from lifecycle.cli import app

TRAFFIC = Path(__file__).parents[1] / "docs" / "traffic.md"
CPU = torch.device("cpu")


def cheapest(step: Step) -> int:
    """By trying everything: load any content at any time, show what is next, copy out what would be lost."""
    changing = step.weights - step.frozen
    queue = [(0, 0, "", False)]  # bytes, contents shown so far, what is on the device, whether the optimizer is
    seen = set()
    while True:
        cost, shown, held, optimizer = heapq.heappop(queue)
        if (shown, held, optimizer) in seen:
            continue
        seen.add((shown, held, optimizer))
        if shown == len(step.shows):
            return cost + step.trained * (changing + step.optimizer)
        last = shown == len(step.shows) - 1
        if held == step.shows[shown] and (optimizer or not (last and step.trained)):
            heapq.heappush(queue, (cost, shown + 1, held, optimizer))
        if not optimizer:
            heapq.heappush(queue, (cost + step.optimizer, shown, held, True))
        for content in set(step.shows):
            frozen = 0 if held else step.frozen
            heapq.heappush(queue, (cost + changing + frozen, shown, content, optimizer))


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_the_formula_is_the_cheapest_way(shows, weights, optimizer, trained, data):
    """No order of loads and copies gets by with fewer bytes."""
    frozen = data.draw(st.integers(0, weights - 1))
    step = Step(weights, optimizer, tuple(shows), frozen, trained)

    assert minimum(step).total == cheapest(step)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_no_policy_moves_less(shows, weights, optimizer, trained):
    step = Step(weights, optimizer, tuple(shows), trained=trained)

    for moves in formula.POLICIES.values():
        assert moves(step).out >= minimum(step).out
        assert moves(step).into >= minimum(step).into


@pytest.mark.parametrize("wrong", [{"weights": -1}, {"frozen": 3}, {"shows": ()}])
def test_a_step_that_can_not_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"weights|frozen|shows"):
        Step(**{"weights": 2, "optimizer": 12, "shows": ("a",), **wrong})


@pytest.mark.parametrize(
    ("shows", "column"), [(("ref", "old", "actor"), -2), (("ref", "actor", "actor"), 1), (("actor",) * 3, 3)]
)
def test_the_documentation_has_the_formulas_numbers(shows, column):
    """docs/traffic.md tells what each policy moves, in multiples of the weights."""
    step = Step(1, 6, shows)
    rows = re.findall(r"^\| (?:the|a|`).*\|$", TRAFFIC.read_text(encoding="utf-8"), re.MULTILINE)
    rows = rows[:4] if column == -2 else rows[4:]
    told = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

    least = minimum(step).total
    for cells, moves in zip(told, formula.POLICIES.values(), strict=True):
        assert int(cells[column]) == moves(step).total
        assert float(cells[column + 1]) == pytest.approx(moves(step).total / least, abs=0.0051)


@pytest.fixture(name="step", scope="module")
def _step():
    done = CliRunner().invoke(app, ["bench", "step", "--gib", "0.001", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "case", ["old_actor one step behind", "old_actor is the actor", "ref and old_actor are the actor"]
)
def test_ours_moves_the_least(step, case):
    """Every step of every case, out and in, up to the padding of layouts."""
    least = step["figures"]["minimum"][case]

    assert len(step["figures"]["steps"][case]) == 2
    for moved in step["figures"]["steps"][case]:
        assert least["out"] <= moved["out"] <= 1.01 * least["out"]
        assert least["into"] <= moved["into"] <= 1.01 * least["into"]


def test_the_cases_differ(step):
    """The fewer contents, the fewer bytes: one set of weights less each time."""
    most, some, few = (least["into"] for least in step["figures"]["minimum"].values())

    assert most - some == some - few == step["figures"]["weights_bytes"]


def test_who_counted_is_told(step):
    assert step["figures"]["counted_by"] == "our own traffic counter"
    assert step["figures"]["optimizer_bytes"] == 6 * step["figures"]["weights_bytes"]


@pytest.mark.parametrize("shown", [1, 3])
def test_the_peer_that_restores_every_time_does_what_its_formula_says(monkeypatch, shown):
    """What its copies really move in a step, counted where they are made."""
    moved = {"out": 0, "into": 0}

    def counting(way):
        made = getattr(TensorCopies, way)

        def copied(self):
            moved[way] += sum(tensor.nbytes for tensor, _ in self._pairs)
            made(self)

        return copied

    for way in moved:
        monkeypatch.setattr(TensorCopies, way, counting(way))
    peer = step_peers._every_time(2**17, CPU, shown, "arena")
    peer.step()

    assert moved == {"out": peer.least.out, "into": peer.least.into}


def test_copies_bring_back_what_they_took():
    """Tensor by tensor, each at its own place in the buffer."""
    tensors = list(random_weights(llama_shapes(2**17), CPU).values())
    expected = [tensor.clone() for tensor in tensors]
    copies = TensorCopies(tensors, host_buffer(host_bytes(tensors)))
    copies.out()
    for tensor in tensors:
        tensor.zero_()
    copies.into()

    assert all(torch.equal(now, was) for now, was in zip(tensors, expected, strict=True))


def test_masters_are_adam_in_fp32():
    """The same steps as torch's Adam on fp32 parameters; the parameters are the masters, rounded."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, generator=generator).bfloat16()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    masters = AdamWithMasters([ours], lr=1e-2)
    adam = torch.optim.Adam([theirs], lr=1e-2, betas=(0.9, 0.95))
    for _ in range(5):
        ours.grad = torch.randn(5, 7, generator=generator).bfloat16()
        theirs.grad = ours.grad.float()
        masters.step()
        adam.step()

    torch.testing.assert_close(masters.state[ours]["master"], theirs.data)
    assert torch.equal(ours, masters.state[ours]["master"].bfloat16())
    assert state_bytes(masters) == 12 * start.numel()


def test_masters_leave_alone_what_has_no_gradient():
    ours = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = AdamWithMasters([ours])
    masters.step()

    assert masters.state[ours]["steps"] == 0
    assert torch.equal(ours, torch.ones(3, dtype=torch.bfloat16))


def copy(name: str, nbytes: int, category: str = "gpu_memcpy") -> dict:
    return {"cat": category, "name": name, "args": {"bytes": nbytes}}


def test_the_profilers_copies_are_counted_by_direction_and_size():
    """Copies between device and host alone, small ones apart."""
    found = count(
        [
            copy("Memcpy DtoH (Device -> Pinned)", SMALL),
            copy("Memcpy HtoD (Pinned -> Device)", 5 * SMALL),
            copy("Memcpy HtoD (Pageable -> Device)", SMALL - 1),
            copy("Memcpy DtoH (Device -> Pageable)", 8),
            copy("Memcpy DtoD (Device -> Device)", 9 * SMALL),
            copy("Memcpy HtoD", 9 * SMALL, "cuda_runtime"),
            {"name": "no category"},
        ]
    )

    assert found == Copied(out=SMALL, into=5 * SMALL, small_out=8, small_into=SMALL - 1, small_copies=2)
    assert found.total == 6 * SMALL


def test_a_copy_that_does_not_tell_its_bytes_is_an_error():
    """Nothing is counted as nothing."""
    with pytest.raises(RuntimeError, match="does not tell its bytes"):
        count([{"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"stream": 7}}])


def test_the_forward_reads_every_weight():
    """Each has a gradient that is not zero."""
    model = decoder(2**20, CPU)
    model(tokens_for(model, 64)).float().square().sum().backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() > 0, name


def test_the_model_is_as_large_as_its_tensors():
    tensors = random_weights(llama_shapes(2**20), CPU)
    model = Decoder(tensors)

    assert weights_bytes(model) == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert len(list(model.parameters())) == len(tensors)
    assert len(model.layers) == 18


def test_a_change_moves_every_weight_and_never_back():
    """Contents that were there before would need no copy, and a benchmark of copies would measure none."""
    model = decoder(2**17, CPU)
    seen = [[p.detach().clone() for p in model.parameters()]]
    for _ in range(3):
        change(model)
        now = [p.detach().clone() for p in model.parameters()]
        assert all(bool((a != b).all()) for was in seen for a, b in zip(was, now, strict=True))
        assert all(bool(tensor.isfinite().all()) for tensor in now)
        seen.append(now)
