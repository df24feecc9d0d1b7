"""The plain adapter: which tensors it finds and where they belong, what it notices, what it does with gradients."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import attrs
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lifecycle.adapters.plain import PlainAdapter
from lifecycle.errors import ManifestError
from states.resources import Region, Slot


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def llama(tied=True):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@dataclasses.dataclass
class Box:
    inside: object = None


@attrs.define
class SlottedBox:
    inside: object = None


def owned(adapter):
    return {item.name: item for item in adapter.tensors()}


def slots(adapter):
    return {name: item.slot for name, item in owned(adapter).items()}


# -- what is owned, and where -----------------------------------------------------------------------------------------


class Guarded(nn.Module):
    """Lists only part of what is below it."""

    def __init__(self):
        super().__init__()
        self.shown, self.hidden = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield from self.shown.named_modules(memo, f"{prefix}.shown", remove_duplicate)


def test_modules_are_those_that_torch_lists():
    """In torch's order, by torch's names: shared ones each time, absent ones never, some as they list themselves."""
    model, shared = nn.Module(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.first, model.nothing, model.guarded, model.second = shared, None, Guarded(), shared
    model.register_module("absent", None)
    model.odd = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.odd.named_modules = lambda memo, prefix, _: iter([(f"{prefix}.1", model.odd[1])])

    expected = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if not path.startswith("guarded.hidden")
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]

    assert "second.1.running_mean" in expected
    assert "guarded.shown.weight" in expected
    assert not any("hidden" in name or "odd.0" in name for name in expected)
    assert "odd.1.weight" in expected
    assert list(owned(PlainAdapter(model))) == expected


def test_frozen_and_trained_parameters():
    """A parameter is TRAINED when it needs a gradient or an optimizer holds it, else FROZEN."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    adapter = PlainAdapter(model, optimizer)

    assert slots(adapter) == {
        "0.weight": Slot.FROZEN,
        "0.bias": Slot.FROZEN,
        "1.weight": Slot.TRAINED,
        "1.bias": Slot.TRAINED,
        "2.weight": Slot.TRAINED,
        "2.bias": Slot.TRAINED,
    }
    assert {item.region for item in adapter.tensors()} == {Region.WEIGHTS}


def test_buffers():
    """Persistent buffers are small mutable state of the version, the others belong to the rest."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    model.register_buffer("nothing", None)

    got = owned(PlainAdapter(model))

    assert {name: item.slot for name, item in got.items() if item.slot is not Slot.TRAINED} == {
        "0.running_mean": Slot.STATE,
        "0.running_var": Slot.STATE,
        "0.num_batches_tracked": Slot.STATE,
        "table": Slot.REST,
    }
    assert got["table"].region is Region.REST
    assert got["table"].tensor is model.table


@pytest.mark.parametrize("tied", [True, False])
def test_llama(tied):
    """Every parameter of a transformers model is owned under every name, its rotary tables are in the rest."""
    model = llama(tied)

    got = owned(PlainAdapter(model))

    weights = {name: item.tensor for name, item in got.items() if item.region is Region.WEIGHTS}
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert weights.keys() == expected.keys()
    assert all(weights[name] is expected[name] for name in expected)
    assert (got["lm_head.weight"].tensor is got["model.embed_tokens.weight"].tensor) is tied
    assert {name for name, item in got.items() if item.region is Region.REST} == {
        name for name, _ in model.named_buffers()
    }


def test_shared_module_has_all_its_names():
    """A layer used twice is listed under both paths, with one tensor."""
    layer = nn.Linear(2, 2)
    layer.note = [torch.zeros(1)]

    got = owned(PlainAdapter(nn.Sequential(layer, layer), extra=["0.note.0"]))

    assert list(got) == ["0.weight", "0.bias", "1.weight", "1.bias", "0.note.0"]
    assert got["0.weight"].tensor is got["1.weight"].tensor


def test_list_of_modules_has_prefixes():
    """Names of several modules are told apart by their index, and a tie between them stays one tensor."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight

    got = owned(PlainAdapter([first, second]))

    assert list(got) == ["0.weight", "0.bias", "1.weight"]
    assert got["0.weight"].tensor is got["1.weight"].tensor


def test_views_of_owned_storage_are_owned_with_it():
    """Another tensor object over owned bytes is listed in their slot; the same object is not listed twice."""
    model = nn.Linear(4, 4, bias=False)
    model.rows = model.weight.detach()[:2]
    model.same = [model.weight]

    got = owned(PlainAdapter(model, waive=["rows"]))

    assert list(got) == ["weight", "rows"]
    assert got["rows"].tensor is model.rows
    assert got["rows"].slot is Slot.TRAINED


def test_views_of_released_storage_are_still_owned():
    """What belongs together is decided by the storage, which has no address while its memory is given back."""
    model = nn.Linear(4, 4, bias=False)
    model.rows = model.weight.detach()[:2]
    adapter = PlainAdapter(model)
    adapter.remember()
    before = list(owned(adapter))

    model.weight.untyped_storage().resize_(0)
    adapter.check()

    assert list(owned(adapter)) == before == ["weight", "rows"]


@pytest.mark.parametrize(
    ("trained", "persistent", "slot"),
    [(True, True, Slot.TRAINED), (False, True, Slot.STATE), (False, False, Slot.FROZEN)],
)
def test_one_storage_is_one_slot(trained, persistent, slot):
    """Tensors that share a storage go where the most changeable of them belongs."""
    model = nn.Linear(4, 4, bias=False).requires_grad_(trained)
    model.register_buffer("diagonal", model.weight.detach().diagonal(), persistent=persistent)

    assert slots(PlainAdapter(model)) == {"weight": slot, "diagonal": slot}


def hide_plainly(model, tensor):
    model.cache = tensor
    return "cache"


def hide_deep_in_containers(model, tensor):
    model[0].caches = {"keys": [(1, tensor)], 2: "text"}
    return "0.caches.keys.0.1"


def hide_in_dataclass(model, tensor):
    model.box = Box(inside=[tensor])
    return "box.inside.0"


def hide_in_attrs(model, tensor):
    model.box = SlottedBox(inside={"k": tensor})
    return "box.inside.k"


def hide_on_parameter(model, tensor):
    model[0].weight.scale = tensor
    return "0.weight.scale"


def hide_on_attribute(model, tensor):
    model.register_buffer("table", torch.zeros(1))
    model.table.scale = [tensor]
    return "table.scale.0"


HIDING = [
    hide_plainly,
    hide_deep_in_containers,
    hide_in_dataclass,
    hide_in_attrs,
    hide_on_parameter,
    hide_on_attribute,
]


@pytest.mark.parametrize("hide", HIDING)
def test_undeclared_tensor_is_refused_by_its_path(hide):
    """A tensor that belongs to no region makes the attachment fail, wherever it hangs, with what to do about it."""
    model = nn.Sequential(nn.Linear(2, 2))
    path = hide(model, torch.zeros(3))

    with pytest.raises(ManifestError, match=r"Declare in extra=.*waive=") as caught:
        PlainAdapter(model).tensors()

    assert caught.value.problems == (f"{path}: belongs to no region (float32 (3,) on cpu)",)


@pytest.mark.parametrize("hide", HIDING)
def test_declared_tensor_is_in_the_rest(hide):
    """``extra=`` takes the path that the error names."""
    model = nn.Sequential(nn.Linear(2, 2))
    tensor = torch.zeros(3)
    path = hide(model, tensor)

    item = owned(PlainAdapter(model, extra=[path]))[path]

    assert item.tensor is tensor
    assert (item.region, item.slot) == (Region.REST, Slot.REST)


@pytest.mark.parametrize("hide", HIDING)
def test_waived_tensor_is_left_alone(hide):
    """``waive=`` takes the path that the error names."""
    model = nn.Sequential(nn.Linear(2, 2))
    path = hide(model, torch.zeros(3))

    assert path not in owned(PlainAdapter(model, waive=[path]))


def test_patterns():
    """Paths in ``extra=`` and ``waive=`` may be patterns; a pattern never moves a parameter out of the weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model:
        layer.cache, layer.loss = torch.zeros(1), torch.zeros(1)

    got = slots(PlainAdapter(model, extra=["?.cache", "0.*"], waive=["*.loss"]))

    assert got["0.cache"] is got["1.cache"] is got["0.loss"] is Slot.REST
    assert "1.loss" not in got
    assert got["0.weight"] is Slot.TRAINED


def test_objects_are_followed_one_level():
    """What is inside a second object, or inside a module that is not registered, is not the model's structure."""
    model = nn.Linear(2, 2)
    model.box = Box(inside=Box(inside=torch.zeros(1)))
    model.others = [nn.Linear(2, 2)]
    model.loop = []
    model.loop.append(model.loop)

    assert list(owned(PlainAdapter(model))) == ["weight", "bias"]


def test_every_problem_is_listed():
    """One error tells all that is wrong: no region, no bytes, a name used twice, nothing behind a name, strangers."""
    model = nn.Linear(2, 2)
    model.register_buffer("ghost", torch.zeros(2, device="meta"))
    model.cache = [torch.zeros(1), torch.zeros(2)]
    model.deep = {"a.b": torch.zeros(3), "a": {"b": torch.zeros(4)}}
    stranger = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)

    with pytest.raises(ManifestError) as caught:
        PlainAdapter(model, optimizer, extra=["deep.*", "chache"]).tensors()

    assert caught.value.problems == (
        "ghost: is on the meta device and has no bytes",
        "cache.0: belongs to no region (float32 (1,) on cpu)",
        "cache.1: belongs to no region (float32 (2,) on cpu)",
        "deep.a.b: 2 tensors have this name",
        "chache: declared in extra=, but names no tensor",
        "optimizer: steps a parameter outside the model (float32 (5,) on cpu); pass its module",
    )


def test_extra_root():
    """A module that the model does not reach belongs to the rest with all it has; what it shares stays weights."""
    model, draft = Tied(), Tied()
    draft.head = nn.Linear(4, 6)
    draft.embed.weight = model.embed.weight
    draft.cache = torch.zeros(1)

    got = slots(PlainAdapter(model, extra=[("draft", draft)]))

    assert got == {
        "embed.weight": Slot.TRAINED,
        "head.weight": Slot.TRAINED,
        "draft.embed.weight": Slot.TRAINED,
        "draft.head.weight": Slot.REST,
        "draft.head.bias": Slot.REST,
        "draft.cache": Slot.REST,
    }


def test_tensors_without_elements_share_nothing():
    """Two empty tensors have no bytes in common, whatever address they report."""
    model = nn.Linear(2, 2)
    model.register_buffer("none", torch.empty(0), persistent=False)
    model.empty = torch.empty(0)

    with pytest.raises(ManifestError) as caught:
        PlainAdapter(model).tensors()

    assert caught.value.problems == ("empty: belongs to no region (float32 (0,) on cpu)",)


# -- optimizer state --------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def step(model, optimizer, tokens=(1, 2, 3)):
    inputs = torch.tensor([list(tokens)])

    def closure():
        optimizer.zero_grad()
        output = model(inputs)
        loss = getattr(output, "logits", output).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_found(name):
    """Each tensor of the state and of the hyperparameters is listed once, and none before there is any."""
    model = llama()
    optimizer = OPTIMIZERS[name](model.parameters())
    adapter = PlainAdapter(model, optimizer)
    before = adapter.optimizer_tensors()

    step(model, optimizer)
    listed = adapter.optimizer_tensors()

    hyper = [leaf for group in optimizer.param_groups for k, v in group.items() if k != "params" for leaf in leaves(v)]
    state = leaves(dict(optimizer.state))
    assert [item.name for item in before] == (["param_groups.0.lr"] if hyper else [])
    assert {id(item.tensor) for item in listed} == {id(tensor) for tensor in state + hyper}
    assert len({item.name for item in listed}) == len(listed) == len(state) + len(hyper)
    assert [item.name for item in listed[: len(before)]] == [item.name for item in before]
    assert {(item.region, item.slot) for item in listed} == {(Region.OPTIMIZER, Slot.OPTIMIZER)}


def test_optimizer_names_and_order():
    """State is named by the parameter's first name; what was seen earlier keeps its place, the new comes after."""
    model = Tied()
    model.bias = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adapter = PlainAdapter(model, optimizer)
    model.bias.grad = torch.ones(6)
    optimizer.step()
    first = [item.name for item in adapter.optimizer_tensors()]

    optimizer.zero_grad()
    step(model, optimizer)
    second = [item.name for item in adapter.optimizer_tensors()]
    optimizer.state[model.embed.weight], held = {}, optimizer.state[model.embed.weight]
    third = [item.name for item in adapter.optimizer_tensors()]
    optimizer.state[model.embed.weight] = held

    assert first == ["bias.momentum_buffer"]
    assert second == ["bias.momentum_buffer", "embed.weight.momentum_buffer"]
    assert third == first
    assert [item.name for item in adapter.optimizer_tensors()] == second


def test_an_optimizer_is_optional():
    """A frozen actor has none, and no state."""
    model = Tied()

    assert not PlainAdapter(model).has_optimizer()
    assert PlainAdapter(model).optimizer_tensors() == ()
    assert PlainAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1)).has_optimizer()


def test_several_optimizers_have_prefixes():
    """State of several optimizers is told apart by their index, hyperparameters too."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    lr = torch.tensor(0.1)
    made = [torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9) for layer in model]
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in made:
        optimizer.step()

    names = [item.name for item in PlainAdapter(model, made).optimizer_tensors()]

    assert names == ["0.0.weight.momentum_buffer", "1.1.weight.momentum_buffer", "0.param_groups.0.lr"]


class Keeping(torch.optim.Optimizer):
    """Keeps the parameter, a view of its bytes and a copy, and something that belongs to no parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(itself=p, master=p.data.view(-1), copies=[p.clone()], count=1)
        self.state["norms"] = [torch.zeros(2), torch.zeros(3)]


def test_references_to_parameters_are_no_state():
    """Bytes that an optimizer only refers to stay with the weights, and its views are listed there to be moved too."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = Keeping(model.parameters())
    optimizer.step()
    adapter = PlainAdapter(model, optimizer)

    state = [item.name for item in adapter.optimizer_tensors()]
    weights = owned(adapter)

    assert state == ["weight.copies.0", "norms.0", "norms.1"]
    assert list(weights) == ["weight", "optimizer.weight.master"]
    assert weights["optimizer.weight.master"].tensor is optimizer.state[model.weight]["master"]
    assert weights["optimizer.weight.master"].slot is Slot.TRAINED


def test_state_of_a_stranger_is_refused():
    """State whose parameter left the model has no name to be stored under."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = Keeping(model.parameters())
    optimizer.step()
    model.weight = nn.Parameter(torch.zeros(2, 2))

    with pytest.raises(ManifestError, match=r"optimizer keeps state of a parameter that is not the model's: float32"):
        PlainAdapter(model, optimizer).optimizer_tensors()


def test_listed_state_is_what_is_there():
    """In-place steps change no object; a loaded state dict brings others under the same names."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    adapter = PlainAdapter(model, optimizer)
    step(model, optimizer)
    listed = adapter.optimizer_tensors()

    step(model, optimizer)
    stepped = adapter.optimizer_tensors()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded = adapter.optimizer_tensors()

    assert listed
    assert all(now.tensor is was.tensor for now, was in zip(stepped, listed, strict=True))
    assert all(now.tensor is not was.tensor for now, was in zip(loaded, listed, strict=True))
    assert [item.name for item in loaded] == [item.name for item in listed]


def test_listed_state_is_not_kept_alive():
    """State that its optimizer gave up frees its memory at once, and is not listed again."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    adapter = PlainAdapter(model, optimizer)
    step(model, optimizer)
    adapter.optimizer_tensors()
    moment = weakref.ref(optimizer.state[model.embed.weight]["exp_avg"])

    optimizer.state.clear()

    assert moment() is None
    assert adapter.optimizer_tensors() == ()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rebuilt_optimizer_is_a_new_one(name):
    """After the first state is taken away again, the next step does what a new optimizer's first step does."""
    model, twin = llama(), llama()
    twin.load_state_dict(model.state_dict())
    optimizer, new = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    adapter = PlainAdapter(model, optimizer)
    before, skeleton = [item.name for item in adapter.optimizer_tensors()], adapter.optimizer_skeleton()
    step(model, optimizer)

    adapter.rebuild_optimizer(skeleton)
    model.load_state_dict(twin.state_dict())
    listed = [item.name for item in adapter.optimizer_tensors()]
    step(model, optimizer, (4, 5))
    step(twin, new, (4, 5))

    assert listed == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_rebuilding_puts_everything_back():
    """Tensors and entries are the same objects, plain values are what they were; the rest is gone."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = Keeping([model[0].weight])
    optimizer.step()
    entry, norms = optimizer.state[model[0].weight], optimizer.state["norms"]
    was, held = dict(entry), [*norms, entry["copies"][0]]
    adapter = PlainAdapter(model, optimizer)
    skeleton = adapter.optimizer_skeleton()

    for _ in range(2):  # a skeleton can be used again
        optimizer.step()
        entry.update(count=7, more=torch.zeros(1))
        entry["copies"].append(torch.zeros(1))
        del entry["itself"]
        optimizer.state[model[1].weight] = {"count": 1}
        adapter.rebuild_optimizer(skeleton)

        assert list(optimizer.state) == [model[0].weight, "norms"]
        assert optimizer.state[model[0].weight] is entry
        assert {key: entry[key] for key in ("itself", "master", "count")} == {
            key: was[key] for key in ("itself", "master", "count")
        }
        assert list(entry) == list(was)
        now = [*optimizer.state["norms"], *entry["copies"]]
        assert all(a is b for a, b in zip(now, held, strict=True))


# -- structural changes -----------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One of each kind of tensor."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.cache = {"keys": torch.zeros(2)}
        self.scratch = torch.zeros(1)


def add_parameter(model, optimizer):
    model.norm.gate = nn.Parameter(torch.zeros(1))


def add_module(model, optimizer):
    model.extra = nn.Linear(1, 1)


def add_attribute(model, optimizer):
    model.cache["values"] = torch.zeros(2)


def remove_buffer(model, optimizer):
    del model.table


def remove_module(model, optimizer):
    del model.other


def replace_parameter(model, optimizer):
    model.other.weight = nn.Parameter(model.other.weight.detach().clone())


def replace_buffer(model, optimizer):
    model.norm.running_mean = torch.ones(4)


def replace_attribute(model, optimizer):
    model.cache["keys"] = torch.zeros(2)


def replace_by_inference_tensor(model, optimizer):
    with torch.inference_mode():
        model.norm.running_var = model.norm.running_var.clone()


def untie(model, optimizer):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def tie(model, optimizer):
    model.other.weight = model.embed.weight


def tie_to_another(model, optimizer):
    model.head.weight = model.other.weight


def cast(model, optimizer):
    model.other.half()


def cast_and_replace(model, optimizer):
    model.other.weight = nn.Parameter(model.other.weight.detach().double())


def reshape(model, optimizer):
    model.other.weight.data = model.other.weight.data.view(4, 6)


def rebind(model, optimizer):
    model.other.weight.data = model.other.weight.data.clone()


def move(model, optimizer):
    model.other.to("meta")


def load_by_assignment(model, optimizer):
    model.norm.load_state_dict({k: v.clone() for k, v in model.norm.state_dict().items()}, assign=True)


def swap_in_optimizer(model, optimizer):
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(6, 4))


def add_to_optimizer(model, optimizer):
    optimizer.add_param_group({"params": [model.norm.weight]})


CHANGES = [
    (add_parameter, ["norm.gate: added (float32 (1,) on cpu)"]),
    (add_module, ["extra.weight: added (float32 (1, 1) on cpu)", "extra.bias: added (float32 (1,) on cpu)"]),
    (add_attribute, ["cache.values: added (float32 (2,) on cpu)"]),
    (remove_buffer, ["table: removed"]),
    (remove_module, ["other.weight: removed"]),
    (replace_parameter, ["other.weight: replaced by another tensor"]),
    (replace_buffer, ["norm.running_mean: replaced by another tensor"]),
    (replace_attribute, ["cache.keys: replaced by another tensor"]),
    (replace_by_inference_tensor, ["norm.running_var: replaced by another tensor"]),
    (untie, ["head.weight: untied from embed.weight, replaced by another tensor"]),
    (tie, ["other.weight: tied to embed.weight, tied to head.weight, replaced by another tensor"]),
    (tie_to_another, ["head.weight: untied from embed.weight, tied to other.weight, replaced by another tensor"]),
    (cast, ["other.weight: cast from torch.float32 to torch.float16"]),
    (cast_and_replace, ["other.weight: replaced by another tensor, cast from torch.float32 to torch.float64"]),
    (reshape, ["other.weight: reshaped from (6, 4) to (4, 6)"]),
    (rebind, ["other.weight: given other bytes or strides (its .data was assigned)"]),
    (move, ["other.weight: replaced by another tensor, moved from cpu to meta"]),
    (
        load_by_assignment,
        [
            f"norm.{name}: replaced by another tensor"
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        ],
    ),
    (
        swap_in_optimizer,
        [
            "optimizer: no longer has the parameter other.weight",
            "optimizer: has a new parameter, a tensor that is not the model's, float32 (6, 4) on cpu",
        ],
    ),
    (add_to_optimizer, ["optimizer: has a new parameter, norm.weight"]),
]


@pytest.mark.parametrize(("change", "problems"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_structural_change_is_named(change, problems):
    """Whatever changes the structure behind the controller's back is an error that says what, where and how."""
    model = Everything()
    optimizer = torch.optim.AdamW([model.embed.weight, model.other.weight])
    adapter = PlainAdapter(model, optimizer, extra=["cache.*"], waive=["scratch"])
    adapter.remember()
    adapter.check()

    change(model, optimizer)
    with pytest.raises(ManifestError, match="the model is not what was attached") as caught:
        adapter.check()

    assert list(caught.value.problems) == problems


def test_remember_takes_what_is_there():
    """After a change is accepted, the new structure is the attached one."""
    model = Tied()
    adapter = PlainAdapter(model)
    adapter.remember()
    untie(model, None)

    adapter.remember()

    adapter.check()


def test_what_is_no_structural_change():
    """Values, in-place writes, gradients, requires_grad, waived attributes and regrouped parameters are free."""
    model = Everything()
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight]}, {"params": [model.other.weight]}])
    adapter = PlainAdapter(model, optimizer, extra=["cache.*"], waive=["scratch"])
    adapter.remember()

    model.other.weight.data.zero_()
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    model.other.weight.grad = torch.zeros(6, 4)
    model.norm.requires_grad_(False)
    model.scratch = torch.zeros(5)
    optimizer.param_groups.reverse()

    adapter.check()


def test_a_consistent_replacement_is_not_called_untied():
    """When both names of a tie get one new tensor, they are replaced and still tied."""
    model = Tied()
    adapter = PlainAdapter(model)
    adapter.remember()

    model.embed.weight = model.head.weight = nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(ManifestError) as caught:
        adapter.check()

    assert caught.value.problems == (
        "embed.weight: replaced by another tensor",
        "head.weight: replaced by another tensor",
    )


def test_changes_of_one_of_several_optimizers():
    """The error says which optimizer's parameters changed."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    adapter = PlainAdapter(model, optimizers)
    adapter.remember()

    optimizers[1].param_groups[0]["params"].clear()
    with pytest.raises(ManifestError) as caught:
        adapter.check()

    assert caught.value.problems == ("optimizer 1: no longer has the parameter 1.weight",)


def test_another_order_is_no_change():
    """A parameter that was taken out and put back comes last, and is what it was; put back as a clone it is not."""
    model = nn.Linear(2, 2)
    adapter = PlainAdapter(model)
    adapter.remember()
    weight = model.weight
    del model.weight
    model.weight = weight
    adapter.check()

    del model.weight
    model.weight = nn.Parameter(weight.detach().clone())
    with pytest.raises(ManifestError) as caught:
        adapter.check()

    assert list(model.state_dict()) == ["bias", "weight"]
    assert caught.value.problems == ("weight: replaced by another tensor",)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_discarded_gradients_come_back_as_zeros():
    """Exactly the discarded gradients return, as zeros, once; tied ones count once, others are left alone."""
    model = Tied()
    model.idle = nn.Parameter(torch.zeros(3))
    adapter = PlainAdapter(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    size = 6 * 4 * 4

    held = adapter.grad_bytes()
    freed = adapter.discard_grads()
    after = adapter.grad_bytes()
    gone = model.embed.weight.grad
    again = adapter.discard_grads()
    made = adapter.zero_grads()

    assert (held, freed, after, gone, again, made) == (size, size, 0, None, 0, size)
    assert torch.equal(model.embed.weight.grad, torch.zeros(6, 4))
    assert model.idle.grad is None
    model.embed.weight.grad = None
    assert adapter.zero_grads() == 0
    assert model.embed.weight.grad is None


def test_a_gradient_made_since_is_left_alone():
    """Zeros never overwrite a gradient that came after the discarding."""
    model = Tied()
    adapter = PlainAdapter(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    adapter.discard_grads()
    model.embed.weight.grad = torch.ones(6, 4)

    assert adapter.zero_grads() == 0
    assert torch.equal(model.embed.weight.grad, torch.ones(6, 4))


def test_sparse_gradients_are_discarded_too():
    """A sparse gradient counts with its dense size and comes back dense."""
    embed = nn.Embedding(6, 4, sparse=True)
    adapter = PlainAdapter(embed)
    embed(torch.tensor([1])).sum().backward()

    assert adapter.discard_grads() == 6 * 4 * 4
    assert adapter.zero_grads() == 6 * 4 * 4
    assert embed.weight.grad.layout is torch.strided


# -- what there is not ------------------------------------------------------------------------------------------------


def test_no_workspaces_groups_or_graphs_on_the_cpu():
    """Plain modules on the CPU have nothing to drop, to suspend or to wait for."""
    model = Everything()
    adapter = PlainAdapter(model, extra=["cache.*"], waive=["scratch"])
    before = owned(adapter)

    adapter.suspend_groups()
    adapter.reload_groups()
    adapter.settle()

    assert adapter.workspace_bytes() == adapter.drop_workspaces() == 0
    assert not adapter.graphs_captured()
    assert not adapter.has_groups()
    assert not adapter.groups_up()
    assert all(owned(adapter)[name].tensor is item.tensor for name, item in before.items())


def test_a_removed_adapter_holds_no_views():
    """Afterwards nothing that this adapter made shares the model's storages, so that another may take them over."""
    model = Tied()
    adapter = PlainAdapter(model)
    adapter.remember()
    storage = model.embed.weight.untyped_storage().data_ptr()

    adapter.remove()

    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    assert [t for t in tensors if t.untyped_storage().data_ptr() == storage] == [model.embed.weight]


def test_the_adapter_makes_no_cycles():
    """A model and its adapter are freed when they are dropped, without waiting for the garbage collector."""
    model = Tied()
    adapter = PlainAdapter(model, torch.optim.AdamW(model.parameters()))
    adapter.tensors()
    adapter.remember()
    weight = weakref.ref(model.embed.weight)
    gc.collect()
    gc.disable()
    try:
        del model, adapter
        assert weight() is None
    finally:
        gc.enable()
