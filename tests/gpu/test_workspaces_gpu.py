"""Workspaces of the real libraries: cuBLAS's of torch, and all of TransformerEngine's where it is installed."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lifecycle import ActorLifecycle, TransitionRefused, graphs
from lifecycle.bench.workspaces import Stack
from lifecycle.memory.holders import holders
from lifecycle.workspaces.cublas import TorchCublas
from lifecycle.workspaces.transformer_engine import QuantisedWeights

# TransformerEngine warns of much, at import and later; that a cache of it was not found is an error.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore", "error:transformer_engine.*runs quantised:RuntimeWarning"),
]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SHAPE = (4096, 8192)  # 64 MiB of bf16: large enough for allocations of their own


@pytest.fixture(autouse=True)
def no_leftovers():
    """Other tests' tensors, graphs and cached memory are gone."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def te():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import transformer_engine.pytorch
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"transformer_engine.pytorch can not be imported: {error}")
    return transformer_engine.pytorch


@pytest.fixture(scope="module")
def recipes(te):
    from transformer_engine.common import recipe

    return recipe


@pytest.fixture
def stack(te):
    """Three layers, 192 MiB of weights."""
    torch.manual_seed(0)
    return Stack(te, 3, SHAPE)


@pytest.fixture
def hidden():
    """With a gradient wanted, so that weights are quantised along both directions."""
    return torch.randn(256, SHAPE[0], dtype=torch.bfloat16, device="cuda", requires_grad=True)


def free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def records(actor, kind):
    return [one for one in actor.journal if one.kind == kind and one.effect == "drop_workspaces"]


# -- torch ------------------------------------------------------------------------------------------------------------


def test_torchs_cublas_workspaces_are_given_back_and_made_again():
    """What the allocator has fewer, and the next product has the same bits."""
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    before = a @ b
    held = torch.cuda.memory_allocated()

    given = TorchCublas().drop()

    assert given >= MIB
    assert held - torch.cuda.memory_allocated() == given
    assert torch.equal(a @ b, before)
    assert TorchCublas().nbytes() == 0


# -- TransformerEngine ------------------------------------------------------------------------------------------------


def test_quantised_weights_are_dropped_before_the_pause(stack, hidden):
    """Given back at the driver beside the weights; nothing of them is copied; the next forward has the same bits."""
    with ActorLifecycle(stack) as actor:
        free()  # of what attaching left
        before = stack(hidden, True).detach()
        held = QuantisedWeights([stack]).nbytes()
        resident = free()
        actor.sleep()
        asleep = free()
        left = QuantisedWeights([stack]).nbytes()
        copied = actor.traffic.device_to_host
        (dropped,) = records(actor, "effect")
        actor.wake_up()
        after = stack(hidden, False).detach()

    assert weight_bytes(stack) <= held <= 1.01 * weight_bytes(stack)
    assert left == 0
    assert held <= dropped.nbytes <= held + 256 * MIB  # cuBLAS's, for each stream
    assert asleep - resident >= held + weight_bytes(stack) - 96 * MIB
    assert weight_bytes(stack) <= copied <= 1.01 * weight_bytes(stack)
    assert torch.equal(after, before)


@pytest.mark.parametrize("first", [True, False, None])
@pytest.mark.parametrize("name", ["Float8BlockScaling", "Float8CurrentScaling"])
def test_any_forward_after_a_drop_has_the_same_bits(te, recipes, name, first):
    """Whether it is told that it is the first or not: what is missing is made from the weights."""
    module = te.Linear(1024, 1024, params_dtype=torch.bfloat16)
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    recipe = getattr(recipes, name)()

    def forward(is_first):
        with te.autocast(enabled=True, recipe=recipe):
            return module(x, is_first_microbatch=is_first).detach()

    before = forward(True)
    held = QuantisedWeights([module]).nbytes()
    given = QuantisedWeights([module]).drop()

    assert held >= module.weight.nbytes // 2
    assert given >= held
    assert torch.equal(forward(first), before)


def test_quantised_weights_stay_under_a_captured_graph(stack, hidden):
    """And the journal says why; where addresses do not stay, the sleep is refused."""
    x = torch.randn(16, SHAPE[0], dtype=torch.bfloat16, device="cuda")
    with ActorLifecycle(stack) as actor:
        before = stack(hidden, True).detach()
        held = QuantisedWeights([stack]).nbytes()
        weight = stack.layers[0].weight
        with torch.no_grad():
            expected = x @ weight.t()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x @ weight.t()
        assert graphs.captured()
        if actor.memory.keeps_addresses:
            actor.sleep()
            assert QuantisedWeights([stack]).nbytes() == held
            assert records(actor, "effect") == []
            assert ["captured CUDA graph" in one.note for one in records(actor, "note")] == [True]
            actor.wake_up()
            y.zero_()
            graph.replay()
            torch.testing.assert_close(y, expected)
        else:
            with pytest.raises(TransitionRefused):
                actor.sleep()
        assert QuantisedWeights([stack]).nbytes() == held
        assert torch.equal(stack(hidden, False).detach(), before)
        del graph


def test_other_modules_attach_without_declaring_anything(te):
    """Nothing of theirs belongs to no region; the manifest has parameters and buffers alone."""
    model = torch.nn.ModuleList(
        [
            te.LayerNormLinear(256, 256, bias=False, params_dtype=torch.bfloat16),
            te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16),
            te.Linear(256, 256, params_dtype=torch.bfloat16),
            te.TransformerLayer(256, 512, 4, params_dtype=torch.bfloat16),
        ]
    )
    with ActorLifecycle(model) as actor:
        names = {spec.name for layout in actor.manifest.layouts.values() for spec in layout.tensors}

    assert names == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def test_amax_histories_live_through_a_sleep(te, recipes):
    """Attached before the first forward, which makes them: scales and histories are where and what they were."""
    module = te.Linear(512, 512, params_dtype=torch.bfloat16)
    x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    recipe = recipes.DelayedScaling()

    def forward():
        with te.autocast(enabled=True, recipe=recipe):
            return module(x, is_first_microbatch=True).detach()

    with ActorLifecycle(module) as actor:
        for _ in range(3):
            forward()
        state = module.fp8_meta["scaling_fwd"]
        tensors = state.scale, state.amax_history
        before = [tensor.clone() for tensor in tensors]
        actor.sleep()
        actor.wake_up()
        now = module.fp8_meta["scaling_fwd"]

        assert now.scale is tensors[0]
        assert now.amax_history is tensors[1]
        assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))
        assert before[1].abs().sum() > 0
        forward()


def test_holders_name_quantised_weights(stack, hidden):
    """By the module and the attribute that have them, largest first."""
    stack(hidden, True)
    found = holders("cuda", named={"model": stack})

    named = [one for one in found if "attribute _fp8_workspaces of Linear 'layers.0'" in one.what]

    assert sum(one.nbytes for one in named) >= stack.layers[0].weight.nbytes
    assert any("parameter weight of Linear 'layers.2'" in one.what for one in found)


# -- holders ----------------------------------------------------------------------------------------------------------

HOLDING = """
import json, torch
from lifecycle.memory.holders import beside_tensors, holders
MIB = 1 << 20
kept = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
a = torch.randn(512, 512, device="cuda")
a @ a  # its workspace would take some of what is cached before
torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
found = holders("cuda", named={})
unmapped = beside_tensors({0: 64 * MIB})
print(json.dumps([[[one.what, one.nbytes] for one in some] for some in (found, unmapped)]))
"""


def test_holders_tell_what_is_no_tensor():
    """What torch caches, what it has for nobody in Python, and what is not torch's; in a process of its own.

    What a backend gave back while torch counts it as its own is added to what is not torch's.
    """
    done = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found, unmapped = json.loads(done.stdout)

    assert found[0][0].startswith(f"Tensor of shape ({128 * MIB},), torch.uint8, on cuda:0: global variable kept")
    assert [nbytes for what, nbytes in found if what.startswith("Tensor of shape (512, 512)")] == [MIB]
    told, more = ({what.partition(" on cuda:0")[0]: nbytes for what, nbytes in some} for some in (found, unmapped))
    assert 96 * MIB <= told["cached by torch's allocator"] <= 200 * MIB
    assert MIB <= told["allocated by torch"] <= 128 * MIB  # the product's workspace
    assert told["not torch's"] >= 64 * MIB  # the context at least
    assert abs(more["not torch's"] - told["not torch's"] - 64 * MIB) <= MIB
