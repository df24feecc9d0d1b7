"""How models are cut into blocks, what comes with which, and that nobody reads a block before it is there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
import torch
from deep import Deep, close_all, late, poisoned
from rig import TOKENS, Rig, equal, make_rig
from torch import Tensor, nn
from torch.nn import functional
from ways import STREAM, wake

from lifecycle import ActorLifecycle
from lifecycle.adapters.blocks import cut
from lifecycle.landing import shares_of
from lifecycle.manifest import PartLayout, TensorSpec
from states.frozen import FROZEN
from states.resources import Region, Slot

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_all()


class Layer(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.act = nn.Tanh() if act is None else act

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.act(self.inner(hidden))


class Causal(nn.Module):
    """Embedding, layers, norm and head, as in Llama; some layers may be dropped, and the head read and not called."""

    def __init__(self, layers: int = 4, tied: bool = False, act: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Layer(act) for _ in range(layers)])
        self.norm = nn.LayerNorm(8, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, run: Iterable[int] | None = None, fused: bool = False) -> Tensor:
        hidden = self.embed(tokens)
        for number in range(len(self.layers)) if run is None else run:
            hidden = self.layers[number](hidden)
        if fused:  # as losses do that keep the logits of no more than a chunk
            return functional.linear(hidden * self.norm.weight, self.head.weight)
        return self.head(self.norm(hidden))


def cut_of(*models: nn.Module) -> tuple[list[set[str]], dict[str, set[int]]]:
    """Names by block; the blocks that modules wait for, by each path of a module."""
    roots = [("", models[0])] if len(models) == 1 else [(str(i), model) for i, model in enumerate(models)]
    parts = cut(roots)
    waits: dict[str, set[int]] = {}
    for prefix, root in roots:
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            if numbers := {number for number, one in parts.waits if one is module}:
                waits[path] = numbers
    return [set(names) for names in parts.names], waits


# what the cut is


@pytest.mark.parametrize(("layers", "middle"), [(2, 1), (3, 1), (4, 2), (5, 2), (12, 6)])
def test_layers_and_what_comes_after_them(layers, middle):
    """The embedding is named by no block, so it comes first; norm and head come with the layer in the middle."""
    names, waits = cut_of(Causal(layers))

    for number in range(layers):
        after = {"norm.weight", "head.weight"} if number == middle else set()
        assert names[number] == {f"layers.{number}.inner.weight"} | after
    assert waits == {
        "norm": {middle},
        "head": {middle},
        **{
            f"layers.{number}{part}": {number, middle} if number > middle else {number}
            for number in range(1, layers)
            for part in ("", ".inner")
        },
    }


def test_nothing_after_the_layers():
    """Then layers wait for themselves alone."""
    model = Causal(3)
    del model.norm, model.head
    names, waits = cut_of(model)
    assert names == [{f"layers.{number}.inner.weight"} for number in range(3)]
    assert waits == {f"layers.{number}{part}": {number} for number in (1, 2) for part in ("", ".inner")}


def test_a_wrapped_model():
    """As in Hugging Face's classes: layers below a model below the root."""
    root = nn.Module()
    root.model = Causal(2)
    root.lm_head = nn.Linear(8, 12)
    names, waits = cut_of(root)
    assert names[0] == {"model.layers.0.inner.weight"}
    assert names[1] == {
        *("model.layers.1.inner.weight", "model.norm.weight", "model.head.weight"),
        *("lm_head.weight", "lm_head.bias"),
    }
    assert waits.keys() == {"model.layers.1", "model.layers.1.inner", "model.norm", "model.head", "lm_head"}


def test_a_sequential_is_cut_where_there_is_no_list():
    """Into its children that have weights; those without come with no block and wait for none."""
    names, waits = cut_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)))
    assert names == [{"0.weight", "0.bias"}, {"2.weight"}]
    assert waits == {"2": {1}}

    model = Causal(2)
    model.stem = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert len(cut_of(model)[0]) == 2


def test_nested_lists():
    """The outermost list has the layers; what is called of such a layer is what is in it."""
    model = nn.Module()
    model.pairs = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)]) for _ in range(2)])
    names, waits = cut_of(model)
    assert names == [{f"pairs.{i}.{j}.weight" for j in range(2)} for i in range(2)]
    assert waits == {"pairs.1": {1}, "pairs.1.0": {1}, "pairs.1.1": {1}}


def test_two_roots():
    """Their layers are numbered on; between the layers of the one and the other is what comes first."""
    names, waits = cut_of(Causal(4), Causal(2), nn.Linear(8, 1))

    assert names[:3] == [{f"0.layers.{number}.inner.weight"} for number in range(3)]
    assert names[3] == {
        *("0.layers.3.inner.weight", "1.norm.weight", "1.head.weight"),
        *("2.weight", "2.bias"),
    }
    assert names[4:] == [{f"1.layers.{number}.inner.weight"} for number in range(2)]
    assert waits["1.layers.0"] == {4, 3}
    assert waits["1.layers.1.inner"] == {5, 3}
    assert waits["1.head"] == waits["2"] == {3}
    assert "0.head" not in waits


def test_what_reads_nothing_waits_for_nothing():
    """An activation that all layers share must not have the first of them wait for the last."""
    shared, own = cut_of(Causal(act=nn.ReLU())), cut_of(Causal())
    assert shared == own
    assert not any(path.endswith("act") for path in shared[1])


def test_shared_modules_wait_for_all_their_blocks():
    model = Causal(3)
    model.layers[2].inner = model.layers[0].inner
    names, waits = cut_of(model)
    assert "layers.0.inner.weight" in names[0]
    assert "layers.2.inner.weight" in names[2]
    assert waits["layers.0.inner"] == waits["layers.2.inner"] == {2, 1}


def test_buffers_come_with_their_layer():
    """Those of the root are there first."""
    model = Causal(2)
    model.register_buffer("scale", torch.ones(8))
    model.layers[1].register_buffer("table", torch.ones(8))
    model.layers[0].norm = nn.BatchNorm1d(8, affine=False)
    names, _ = cut_of(model)
    assert "layers.1.table" in names[1]
    assert {f"layers.0.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")} < names[0]
    assert not any("scale" in block for block in names)


def scripted(model: Causal) -> nn.Module:
    model.layers[1].act = torch.jit.script(nn.Tanh())
    return model


def compiled_inside(model: Causal) -> nn.Module:
    model.layers[1].inner.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        Causal(1),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Linear(8, 8)]),
        lambda: compiled_inside(Causal()),
        lambda: torch.compile(Causal(), backend="eager"),
        lambda: scripted(Causal()),
    ],
    ids=["no layer", "one layer", "one in a sequential", "one with weights", "in place", "compiled", "scripted"],
)
def test_what_is_not_cut(model):
    parts = cut([("", model if isinstance(model, nn.Module) else model())])
    assert (parts.names, parts.waits) == ((), ())


# what comes with which block


def busy_of(model: nn.Module) -> Rig:
    return make_rig(tags=("ref",), memory=late(), model=model)


def layout(*groups: tuple[str, ...]) -> PartLayout:
    """Tensors that share bytes, group by group."""
    specs = [
        TensorSpec(name, "float32", (1,), (1,), 4 * group, group, 4)
        for group, names in enumerate(groups)
        for name in names
    ]
    return PartLayout(Slot.TRAINED, Region.WEIGHTS, 4 * len(groups), tuple(specs))


def test_shares():
    """What one block names comes with it; what none or several name is there first, and so is what hangs elsewhere."""
    wanted = (frozenset({"a"}), frozenset({"b", "c", "tied", "view"}), frozenset({"d", "also tied", "of another part"}))
    part = layout(("e",), ("b", "c"), ("tied", "also tied"), ("d",), ("a",), ("view", "elsewhere"))

    assert {number: set(names) for number, names in shares_of(part, wanted).items()} == {
        0: {"a", "e", "tied", "also tied", "view", "elsewhere"},
        1: {"b", "c"},
        2: {"d"},
    }
    assert shares_of(part, ()) == {0: tuple(spec.name for spec in part)}
    assert shares_of(layout(), wanted) == {}


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_there_first(tied):
    """The embedding is the same bytes."""
    rig = busy_of(Causal(tied=tied))
    backend, wanted = rig.actor._world.backend, rig.actor._world.adapter.blocks()
    shares = shares_of(backend.layout(Slot.TRAINED), wanted)
    assert ("head.weight" in shares[0], "head.weight" in shares[2]) == (tied, not tied)
    assert "embed.weight" in shares[0]
    assert sorted(name for names in shares.values() for name in names) == sorted(rig.model.state_dict())


# nobody reads what has not come


def runs(layers: int) -> list[tuple[int, ...]]:
    """The layers that are called, with at least one of the second half."""
    some = [run for size in range(1, layers + 1) for run in combinations(range(layers), size)]
    return [run for run in some if run[-1] >= layers // 2]


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_head_that_is_read_without_being_called(layers):
    """Whichever layers are dropped: one of the second half was called, so what comes after them is there."""
    rig = busy_of(Causal(layers))
    for run in runs(layers):
        want = rig.model(TOKENS, run, fused=True)
        for order in (run, run[::-1]):
            wake(rig, stream=True)
            assert poisoned(nn.ModuleList([rig.model.norm, rig.model.head]))
            got = rig.model(TOKENS, order, fused=True)
            if order == run:
                assert equal(got, want)
            assert not poisoned(nn.ModuleList([rig.model.norm, rig.model.head, *(rig.model.layers[n] for n in run)]))
    rig.check()


def test_dropped_layers_are_not_waited_for():
    """What is skipped stays on its way."""
    rig = busy_of(Causal(5))
    want = rig.model(TOKENS, (0, 4), fused=True)
    wake(rig, stream=True)
    assert equal(rig.model(TOKENS, (0, 4), fused=True), want)
    assert [poisoned(layer) for layer in rig.model.layers] == [False, True, False, True, False]
    rig.check()


@pytest.mark.parametrize("name", ["norm", "head"])
def test_what_comes_after_the_layers_is_called_first(name):
    """By itself, with no layer called: it waits for the block that it comes with, and for no other."""
    rig = busy_of(Causal(4))
    hidden = torch.ones(2, 8)
    want = getattr(rig.model, name)(hidden)
    wake(rig, stream=True)
    assert equal(getattr(rig.model, name)(hidden), want)
    assert [poisoned(layer) for layer in rig.model.layers] == [False, True, False, True]
    rig.check()


def test_a_shared_activation_hides_nothing():
    """The first layer is called, and the others are still on their way."""
    rig = busy_of(Causal(3, act=nn.ReLU()))
    hidden = torch.ones(2, 8)
    want = rig.model.layers[0](hidden)
    wake(rig, stream=True)
    assert equal(rig.model.layers[0](hidden), want)
    assert [poisoned(layer) for layer in rig.model.layers] == [False, True, True]


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (1, 1)])
def test_roots_that_read_their_heads(sizes):
    """Each called by itself, as the first: no head is read before it is there."""
    models = [Causal(size) for size in sizes]
    want = [model(TOKENS, fused=True) for model in models]
    for number, model in enumerate(models):
        with ActorLifecycle(models, None, (), late(), "pinned", machine=FROZEN) as actor:
            actor.sleep()
            actor.wake_up(stream=True)
            assert equal(model(TOKENS, fused=True), want[number])
            assert not poisoned(model.head)


def test_a_draft_model_that_reads_the_head():
    """What a module beside the model shares with it is there first: no hook tells when that is read."""
    model, draft = Causal(), nn.Linear(8, 12, bias=False)
    draft.weight = model.head.weight
    want, full = functional.linear(torch.ones(2, 8), draft.weight), model(TOKENS)
    with ActorLifecycle(model, None, (), late(), "pinned", extra=[("draft", draft)], machine=FROZEN) as actor:
        actor.sleep()
        actor.wake_up(stream=True)
        assert equal(functional.linear(torch.ones(2, 8), draft.weight), want)
        assert poisoned(model.layers[3])
        assert equal(model(TOKENS), full)


# models of other shapes


class Tied(nn.Module):
    """Blocks that share a module and a parameter; called in another order than they were registered in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1].append(self.blocks[0][0])

    def forward(self, x):
        return self.blocks[0](self.blocks[1](self.blocks[2](x)))


def test_what_blocks_share_is_there_first():
    """Whichever is called first."""
    for number in range(3):
        rig = busy_of(Tied())
        want = rig.model.blocks[number](torch.ones(2, 8))
        wake(rig, stream=True)
        assert poisoned(nn.ModuleList([rig.model.blocks[1][0]]))
        assert equal(rig.model.blocks[number](torch.ones(2, 8)), want)
        assert equal(rig.model(torch.ones(2, 8)), rig.model(torch.ones(2, 8)))
        rig.check()


def test_a_model_without_blocks_is_not_streamed():
    """There is nothing that could run before the rest is there: the caller's stream waits, and the caller need not."""
    torch.manual_seed(0)
    rig = busy_of(nn.Bilinear(4, 4, 4))
    inputs = torch.ones(2, 4), torch.ones(2, 4)
    want = rig.model(*inputs)
    wake(rig, stream=True)
    assert poisoned(rig.model)
    assert equal(rig.model(*inputs), want)
    rig.check()


@STREAM
def test_several_roots(stream):
    """Each root, and each part of each, waits for what it needs."""
    models = [Deep(0), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]
    want = [models[0](TOKENS), models[1](torch.ones(2, 8)), models[1][1](torch.ones(2, 8))]
    for number in range(3):
        with ActorLifecycle(models, None, (), late(), "pinned", machine=FROZEN) as actor:
            actor.sleep()
            actor.wake_up(stream=stream)
            calls = [
                lambda: models[0](TOKENS),
                lambda: models[1](torch.ones(2, 8)),
                lambda: models[1][1](torch.ones(2, 8)),
            ]
            for at in (number, *range(3)):
                assert equal(calls[at](), want[at])
