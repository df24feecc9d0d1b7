"""Droppers: what they find, what they give back, and that the next use has the same bits.

TransformerEngine runs on CUDA alone, so its modules are stood in for by one with the same attributes and the same rule
(a forward that finds no quantised weight makes one); ``tests/gpu/test_workspaces_gpu.py`` runs the real ones.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from rig import make_rig
from torch import nn

from lifecycle import ActorLifecycle, MissingExtra, workspaces
from lifecycle.adapters.plain import PlainAdapter
from lifecycle.bench.workspaces import measure
from lifecycle.workspaces import Workspace, Workspaces, WorkspacesLeft
from lifecycle.workspaces.caches import CachedCalls, RotaryCaches
from lifecycle.workspaces.cublas import TorchCublas
from lifecycle.workspaces.tensors import leaves, nbytes
from lifecycle.workspaces.transformer_engine import CublasWorkspaces, DummyGradients, QuantisedWeights

SIZE = 32
CACHE_BYTES = SIZE * SIZE + 4  # int8 data and one float32 scale


class Quantizer:
    def __init__(self, scale):
        self.scale = scale


class Quantised:
    """int8 data and a scale; its quantizer holds a tensor that is state."""

    def __init__(self, weight):
        scale = weight.abs().amax().reshape(1) / 127
        self._rowwise_data = (weight / scale).round().to(torch.int8)
        self._rowwise_scale_inv = scale
        self._columnwise_data = None
        self._quantizer = Quantizer(torch.ones(50))

    def weight(self):
        return self._rowwise_data.float() * self._rowwise_scale_inv


class Recipe:
    def __init__(self):
        self.amax_history = torch.arange(16.0)


class Linear(nn.Module):
    """What TransformerEngine's has: the cache, recipe state, quantizers."""

    def __init__(self, cache="_fp8_workspaces"):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.bias = torch.Tensor()  # as where there is none
        self.fp8_initialized = False
        self.cache = cache
        setattr(self, cache, {})
        self.fp8_meta = {"scaling_fwd": Recipe(), "updated_scale_fwd": torch.ones(3)}
        self.quantizers = {"scaling_fwd": [torch.ones(1)]}

    def forward(self, x, is_first_microbatch=None):
        self.fp8_initialized = True
        kept = getattr(self, self.cache).get("weight") if is_first_microbatch is not None else None
        if kept is None or is_first_microbatch:
            kept = Quantised(self.weight.detach())
            if is_first_microbatch is not None:
                getattr(self, self.cache)["weight"] = kept
        return x @ kept.weight()


Linear.__module__ = "transformer_engine.pytorch.module.linear"


@pytest.fixture(name="te")
def _te(monkeypatch):
    """Modules under the names of TransformerEngine's own, with what its versions keep in them."""
    names = ("", ".pytorch", ".pytorch.module.base", ".pytorch.cpp_extensions.gemm")
    found = {name: types.ModuleType(f"transformer_engine{name}") for name in names}
    for module in found.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(
        base=found[".pytorch.module.base"],
        gemm=found[".pytorch.cpp_extensions.gemm"],
    )


def model_of(count=3, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(Linear(**options) for _ in range(count)))


def run(model, x, **options):
    for module in model:
        x = module(x, **options)
    return x


# -- TransformerEngine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["_fp8_workspaces", "_quantized_weight_workspaces", "_weight_workspace"])
@pytest.mark.parametrize("first", [True, False, None])
@pytest.mark.usefixtures("te")
def test_quantised_weights_are_dropped_and_made_again(cache, first):
    """Their real bytes are counted; afterwards they are gone, and any forward has the bits it had before."""
    model, x = model_of(cache=cache), torch.randn(4, SIZE)
    dropper = QuantisedWeights([model])
    before = run(model, x, is_first_microbatch=True)

    assert dropper.nbytes() == dropper.drop() == 3 * CACHE_BYTES
    assert dropper.nbytes() == 0
    assert torch.equal(run(model, x, is_first_microbatch=first), before)


@pytest.mark.usefixtures("te")
def test_dropped_weights_are_freed():
    """Nothing of ours keeps them."""
    model = model_of(1)
    run(model, torch.randn(1, SIZE), is_first_microbatch=True)
    data = weakref.ref(model[0]._fp8_workspaces["weight"]._rowwise_data)
    gc.disable()
    try:
        QuantisedWeights([model]).drop()
        assert data() is None
    finally:
        gc.enable()


def test_other_libraries_modules_are_left_alone(te):
    """An attribute of the same name on a module that is not TransformerEngine's is the user's."""

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self._fp8_workspaces = {"weight": torch.ones(8)}

    model = Mine()

    assert QuantisedWeights([model]).drop() == 0
    assert model._fp8_workspaces["weight"].sum() == 8


def test_without_the_library_nothing_is_looked_for(monkeypatch):
    """Nobody imported it, so there is nothing to find, and it is not imported here either."""
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    model = model_of()
    run(model, torch.randn(1, SIZE), is_first_microbatch=True)

    assert QuantisedWeights([model]).nbytes() == 0
    assert "transformer_engine" not in sys.modules


@pytest.mark.usefixtures("te")
def test_a_cache_that_is_nowhere_warns_once(monkeypatch):
    """A module that ran quantised without a cache under any known name: the name may have moved. Once for a class."""
    monkeypatch.setattr("lifecycle.workspaces.transformer_engine._warned", set())
    model = model_of(2, cache="_elsewhere")
    dropper = QuantisedWeights([model])
    assert dropper.nbytes() == 0  # it has not run

    run(model, torch.randn(1, SIZE), is_first_microbatch=True)
    with pytest.warns(RuntimeWarning, match="Linear runs quantised, but no cache .* may have moved") as warned:
        assert dropper.nbytes() == 0

    assert len(warned) == 1
    assert dropper.nbytes() == 0


@pytest.mark.usefixtures("te")
def test_caches_from_before_1_8_are_left_and_told(monkeypatch):
    """A forward that is not the first would read them unfilled."""
    monkeypatch.setattr("lifecycle.workspaces.transformer_engine._warned", set())
    model = model_of(1, cache="_elsewhere")
    model[0].weight1_fp8 = Quantised(model[0].weight.detach())
    run(model, torch.randn(1, SIZE), is_first_microbatch=True)

    with pytest.warns(RuntimeWarning, match="before 1.8"):
        assert QuantisedWeights([model]).drop() == 0
    assert model[0].weight1_fp8.weight().shape == (SIZE, SIZE)


@pytest.mark.usefixtures("te")
def test_a_name_alone_is_no_cache(monkeypatch):
    """What is found under such a name and holds no tensors is not cleared."""
    monkeypatch.setattr("lifecycle.workspaces.transformer_engine._warned", set())
    model = model_of(1)
    model[0]._fp8_workspaces["weight"] = "settings"

    assert QuantisedWeights([model]).drop() == 0
    assert model[0]._fp8_workspaces == {"weight": "settings"}


def test_dummy_gradients_are_dropped(te):
    """From the library's own module; where that has none, there are none."""
    assert DummyGradients().drop() == 0
    te.base._dummy_wgrads = {(4, 4, torch.float32): torch.empty(4, 4)}

    assert DummyGradients().nbytes() == DummyGradients().drop() == 64
    assert te.base._dummy_wgrads == {}


def test_cublas_workspaces_of_every_version_are_dropped(te):
    """Cached functions of the newer, global variables of the older ones; sizes that are cached too stay."""
    te.gemm.get_cublas_workspace = functools.lru_cache(maxsize=None)(
        lambda device: [torch.empty(100) for _ in range(2)]
    )
    te.gemm.get_workspace_size = functools.lru_cache(maxsize=None)(lambda: 800)
    te.gemm.get_cublas_workspace(0)
    te.gemm.get_workspace_size()
    te.base._cublas_workspace = torch.empty(25)
    te.base._multi_stream_cublas_workspace = [torch.empty(25)]
    dropper = CublasWorkspaces([nn.Linear(1, 1)])

    assert dropper.nbytes() == dropper.drop() == 1000

    assert te.gemm.get_cublas_workspace.cache_info().currsize == 0
    assert te.gemm.get_workspace_size.cache_info().currsize == 1
    assert te.base._cublas_workspace is None
    assert te.base._multi_stream_cublas_workspace == []
    assert dropper.nbytes() == 0


def test_a_preallocated_cublas_workspace_stays(te):
    """Modules that allocate it in advance keep it out of graphs' memory pools."""
    te.base._cublas_workspace = torch.empty(25)
    model = model_of(1)
    model[0]._prealloc_cublas_workspace = lambda: None
    dropper = CublasWorkspaces([model])

    assert dropper.nbytes() == dropper.drop() == 0
    assert te.base._cublas_workspace.numel() == 25


@pytest.mark.usefixtures("te")
def test_a_model_of_the_library_attaches_and_sleeps_without_its_workspaces():
    """No waive= is needed; the manifest has the weights alone, the sleep drops, recipe state stays, bits come back."""
    model, x = model_of(), torch.randn(4, SIZE)
    before = run(model, x, is_first_microbatch=True)
    state = model[0].fp8_meta["scaling_fwd"].amax_history

    with ActorLifecycle(model) as actor:
        names = [spec.name for layout in actor.manifest.layouts.values() for spec in layout.tensors]
        actor.sleep()
        dropped = [one for one in actor.journal if one.kind == "effect" and one.effect == "drop_workspaces"]
        kept = [dict(module._fp8_workspaces) for module in model]
        actor.wake_up()
        after = run(model, x, is_first_microbatch=False)

    assert sorted(names) == ["0.weight", "1.weight", "2.weight"]
    assert dropped[0].nbytes == 3 * CACHE_BYTES
    assert kept == [{}, {}, {}]
    assert model[0].fp8_meta["scaling_fwd"].amax_history is state
    assert torch.equal(state, torch.arange(16.0))
    assert torch.equal(after, before)


@pytest.mark.usefixtures("te")
def test_a_first_forward_between_attach_and_sleep_is_no_change_of_structure():
    """The cache and the recipe state appear then."""
    model = model_of()
    with ActorLifecycle(model) as actor:
        run(model, torch.randn(1, SIZE), is_first_microbatch=True)
        actor.sleep()
        actor.wake_up()
        assert str(actor.state) == "RESIDENT"


# -- cached methods ---------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as megatron-core has it
    def forward(self, length):
        return torch.outer(torch.arange(float(length)), self.inv_freq)

    @functools.cache  # noqa: B019 - without a bound, so it may stand for one object
    def table(self):
        return torch.ones(10)


@pytest.fixture(name="rotary")
def _rotary(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    kind = type("Rotary", (Rotary,), {})
    kind.__module__ = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    kind.forward = functools.lru_cache(maxsize=32)(Rotary.forward.__wrapped__)
    kind.table = functools.cache(Rotary.table.__wrapped__)
    return kind


def test_rotary_caches_of_known_families_are_dropped(rotary):
    """Bounded caches of the class, on a class derived from it too; without a bound they stay."""
    derived = type("Mine", (rotary,), {})
    model = nn.Sequential(derived())
    before = model[0](8), model[0](16)
    model[0].table()
    dropper = RotaryCaches([model])

    assert dropper.nbytes() == (8 + 16) * 4 * 4
    first = before[0].clone()
    del before
    assert dropper.drop() == (8 + 16) * 4 * 4
    assert dropper.nbytes() == 0
    assert rotary.table.cache_info().currsize == 1
    assert torch.equal(model[0](8), first)


@pytest.mark.usefixtures("rotary")
def test_cached_methods_of_other_classes_are_left_alone():
    """Nothing says that they are functions of their arguments alone."""
    model = Rotary()
    Rotary.forward.cache_clear()
    model(8)

    assert RotaryCaches([model]).drop() == 0
    assert Rotary.forward.cache_info().currsize == 1


def test_cached_calls_of_the_users_are_dropped_when_registered():
    """Given as the wrapped function itself."""
    Rotary.forward.cache_clear()
    Rotary()(4)
    dropper = CachedCalls("my rope", Rotary.forward)

    assert dropper.nbytes() == dropper.drop() == 4 * 4 * 4
    assert Rotary.forward.cache_info().currsize == 0
    with pytest.raises(TypeError, match=r"my rope: .* is not wrapped by functools"):
        CachedCalls("my rope", Rotary.__init__)


def test_the_benchmark_names_what_it_lacks(monkeypatch):
    """Where the library is not installed."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)

    with pytest.raises(MissingExtra, match=r"lifecycle bench workspaces needs 'transformer_engine\[pytorch\]'"):
        measure()


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are cuBLAS workspaces")
def test_without_cuda_there_are_no_cublas_workspaces():
    """Asking makes no context."""
    assert TorchCublas().nbytes() == TorchCublas().drop() == 0
    assert not torch.cuda.is_initialized()


# -- the registry -----------------------------------------------------------------------------------------------------


def of(name, nbytes, log=None):
    held = [nbytes]

    def drop():
        if log is not None:
            log.append(name)
        return held.pop() if held else 0

    return Workspace(name, lambda: sum(held), drop)


def failing(name, error):
    def fail():
        raise error

    return Workspace(name, fail, fail)


def test_all_are_dropped_and_each_says_what_it_gave_back():
    """In order; the report stays until the next drop."""
    log = []
    found = Workspaces([of("one", 3, log), of("two", 5, log)])

    assert found.nbytes() == 8
    assert found.report == ()
    assert found.drop() == 8
    assert log == ["one", "two"]
    assert [(one.name, one.nbytes, one.failure) for one in found.report] == [("one", 3, ""), ("two", 5, "")]
    assert all(0 <= one.seconds < 1 for one in found.report)
    assert found.nbytes() == found.drop() == 0
    assert [one.nbytes for one in found.report] == [0, 0]


def test_one_that_fails_is_named_and_the_others_are_dropped():
    """What the others gave back is in the report."""
    log = []
    broken = failing("broken", RuntimeError("gone"))
    found = Workspaces([of("one", 3, log), broken, of("two", 5, log)])

    with pytest.raises(WorkspacesLeft, match=r"broken \(RuntimeError: gone\)") as raised:
        found.drop()

    assert log == ["one", "two"]
    assert list(raised.value.failures) == ["broken"]
    assert [(one.name, one.nbytes, one.failure) for one in found.report] == [
        ("one", 3, ""),
        ("broken", 0, "RuntimeError: gone"),
        ("two", 5, ""),
    ]


def test_one_that_can_not_be_asked_is_named():
    """Before anything is dropped."""
    found = Workspaces([of("one", 3), failing("broken", KeyError("x")), failing("other", ValueError("y"))])

    with pytest.raises(WorkspacesLeft, match=r"asking for workspaces failed for broken .*; other .*unregister"):
        found.nbytes()


def test_registered_droppers_are_every_actors():
    """From the next sleep on, until they are taken off."""
    dropper = of("mine", 7)
    model = nn.Linear(2, 2)
    adapter = PlainAdapter(model)

    assert workspaces.register(dropper) is dropper
    try:
        assert adapter.workspace_bytes() == PlainAdapter(model, workspaces=[of("own", 1)]).workspace_bytes() - 1 == 7
        with pytest.raises(ValueError, match="'mine' is registered"):
            workspaces.register(of("mine", 1))
        assert adapter.drop_workspaces() == 7
        assert ("mine", 7) in [(one.name, one.nbytes) for one in adapter.droppers.report]
    finally:
        workspaces.unregister(dropper)

    assert adapter.workspace_bytes() == 0
    with pytest.raises(ValueError, match="'mine' is not registered"):
        workspaces.unregister(dropper)


@pytest.mark.parametrize(
    "wrong", [object(), types.SimpleNamespace(name="x"), types.SimpleNamespace(nbytes=int, drop=int)]
)
def test_what_is_no_dropper_is_refused(wrong):
    """When it is registered, not at the first sleep."""
    with pytest.raises(TypeError, match="is no dropper"):
        workspaces.register(wrong)


@pytest.mark.usefixtures("te")
def test_none_has_nothing_dropped():
    """For an actor attached with workspaces=None: neither known nor registered ones."""
    model = model_of()
    run(model, torch.randn(1, SIZE), is_first_microbatch=True)
    dropper = workspaces.register(of("mine", 7))
    try:
        adapter = PlainAdapter(model, workspaces=None)
        assert adapter.workspace_bytes() == adapter.drop_workspaces() == 0
    finally:
        workspaces.unregister(dropper)
    assert all(module._fp8_workspaces for module in model)


def test_a_sleep_drops_what_was_registered():
    """Through a controller, told in its journal, and once."""
    dropper = workspaces.register(of("mine", 7))
    try:
        rig = make_rig()
        rig.actor.sleep()
        rig.actor.wake_up()
        rig.actor.sleep()
        effects = [record for record in rig.actor.journal if record.kind == "effect"]
        rig.actor.close()
    finally:
        workspaces.unregister(dropper)

    assert [record.nbytes for record in effects if record.effect == "drop_workspaces"] == [7]


# -- tensors inside ---------------------------------------------------------------------------------------------------


def test_tensors_are_found_and_each_storage_is_counted_once():
    """In containers and objects; not in modules, quantizers, or tensors without bytes."""
    data, other = torch.zeros(10), torch.zeros(3)
    value = {"a": [data, data[2:]], "b": Quantised(torch.ones(2, 2)), "c": (nn.Linear(9, 9), {"d": other})}

    assert nbytes([value]) == 40 + 12 + (4 + 4)
    assert sum(tensor is other for tensor in leaves(value)) == 1
    assert nbytes([torch.empty(0), torch.empty(5, device="meta"), None, "text"]) == 0
    released = torch.ones(4)
    released.untyped_storage().resize_(0)
    assert nbytes([released]) == 0
