"""The hooks: what they refuse before a byte is read or written, and what they leave alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import ModelOutput

from lifecycle.adapters.plain import PlainAdapter
from lifecycle.errors import ManifestError, TransitionRefused


class Gate:
    """Allows everything but what is in ``refused``, and remembers what it was asked and told."""

    def __init__(self):
        self.refused = set()
        self.heard = []
        self.epoch = 0

    def permit(self, operation):
        self.heard.append(operation)
        if operation in self.refused:
            raise TransitionRefused(operation, "ASLEEP", ("wake_up",), "its bytes are released")

    def content_epoch(self):
        return self.epoch

    def backward_seen(self):
        self.heard.append("backward seen")

    def step_begins(self):
        self.permit("step")

    def step_ends(self):
        self.heard.append("step ended")

    def optimizer_loaded(self):
        self.heard.append("optimizer loaded")


class Block(nn.Module):
    """Two layers and a function without tensors; returns what ``shape`` makes of its result."""

    def __init__(self, shape=lambda result: result):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.shape = shape

    def forward(self, inputs):
        return self.shape(self.layers(inputs))


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    kind: type = dataclasses.field(default_factory=lambda: Plain)


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@pytest.fixture(name="gate")
def _gate():
    return Gate()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(name="attach")
def _attach(gate):
    """Install hooks and take them off after the test."""
    adapters = []

    def attach(model, optimizer=None, gate=gate, **options):
        adapter = PlainAdapter(model, optimizer, **options)
        adapter.install(gate)
        adapters.append(adapter)
        return adapter

    yield attach
    for adapter in adapters:
        adapter.remove()


INPUTS = torch.ones(5, 3)


def values(model):
    # not by state_dict(), which has hooks
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same_gradients(model, before):
    now = gradients(model)
    return all(g is before[n] if g is None or before[n] is None else torch.equal(g, before[n]) for n, g in now.items())


# -- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "layers", "layers.0", "layers.2"])
def test_forward_of_released_weights_is_refused(gate, attach, path):
    """While weights are released every module that reads some refuses to run, before anything else of it runs."""
    model = Block()
    adapter = attach(model)
    module, ran = model.get_submodule(path), []
    module.register_forward_pre_hook(lambda *_: ran.append("a hook of the user"), prepend=True)
    gate.refused = {"forward"}

    adapter.guard_released(True)
    adapter.guard_released(True)
    with pytest.raises(TransitionRefused, match="its bytes are released"):
        module(torch.ones(5, module[0].in_features if path == "layers" else getattr(module, "in_features", 3)))

    assert ran == []
    assert gate.heard == ["forward"]


def test_awake_forward_asks_nothing(gate, attach):
    """Once weights are back no module has a guard left, and outputs are what they were, bit for bit."""
    model = Block()
    before = model(INPUTS)
    adapter = attach(model)
    gate.refused = {"forward"}

    adapter.guard_released(True)
    adapter.guard_released(False)
    adapter.guard_released(False)
    after = model(INPUTS)

    assert torch.equal(before, after)
    assert gate.heard == []
    assert not any(module._forward_pre_hooks for module in model.layers.modules())


def test_forward_that_the_gate_permits_runs(gate, attach):
    """Guarding refuses nothing by itself: the gate decides."""
    model = Block()
    attach(model).guard_released(True)

    assert model(INPUTS).shape == (5, 2)
    assert set(gate.heard) == {"forward"}


def test_module_without_tensors_is_not_guarded(gate, attach):
    """A function that another model may share is nobody's."""
    model = Block()
    attach(model).guard_released(True)
    gate.refused = {"forward"}

    assert torch.equal(model.layers[1](-INPUTS), torch.zeros(5, 3))


def test_extra_root_and_attribute_owner_are_guarded(gate, attach):
    """A draft model beside the model is guarded too, and so is a module that owns nothing but a declared attribute."""
    model, draft, cache = Block(), nn.Linear(3, 2), nn.Identity()
    model.cache, cache.keys = cache, torch.zeros(1)
    adapter = attach(model, extra=[("draft", draft), "cache.keys"])
    gate.refused = {"forward"}
    adapter.guard_released(True)

    for module in (draft, cache):
        with pytest.raises(TransitionRefused):
            module(INPUTS)


def test_guarding_without_hooks_does_nothing():
    """An adapter that was never installed, or was removed, has nothing to guard."""
    model = Block()

    PlainAdapter(model).guard_released(True)

    assert model(INPUTS).shape == (5, 2)


# -- backward ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "tensor": (lambda t: t, lambda out: out),
    "tuple": (lambda t: (None, t), lambda out: out[1]),
    "list": (lambda t: [[t]], lambda out: out[0][0]),
    "dict": (lambda t: {"a": (t,)}, lambda out: out["a"][0]),
    "dataclass": (Plain, lambda out: out.logits),
    "model output": (lambda t: Output(loss=t.sum(), logits=t), lambda out: out.loss),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("had_gradients", [True, False])
def test_refused_backward_writes_no_gradient(gate, attach, shape, had_gradients):
    """A backward that arrives where none is allowed changes no gradient, whatever the output was wrapped in."""
    wrap, unwrap = SHAPES[shape]
    model = Block(wrap)
    attach(model)
    if had_gradients:
        unwrap(model(INPUTS)).sum().backward()
    before, loss = gradients(model), unwrap(model(INPUTS)).sum()
    gate.heard.clear()

    gate.refused = {"backward"}
    with pytest.raises(TransitionRefused, match="backward refused in ASLEEP"):
        loss.backward()

    assert gate.heard == ["backward"]
    assert same_gradients(model, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_over_other_weights_is_refused(gate, attach, shape):
    """Weights that were overwritten between forward and backward would give wrong gradients: it is said, not done."""
    wrap, unwrap = SHAPES[shape]
    model = Block(wrap)
    attach(model)
    loss = unwrap(model(INPUTS)).sum()

    gate.epoch += 1
    with pytest.raises(TransitionRefused, match="switched or restored between forward and backward") as caught:
        loss.backward()

    assert caught.value.event == "backward"
    assert all(gradient is None for gradient in gradients(model).values())
    unwrap(model(INPUTS)).sum().backward()
    assert all(gradient is not None for gradient in gradients(model).values())


def test_backward_of_a_submodule_is_refused(gate, attach):
    """A loss that no root has seen is stopped at the first parameter."""
    model = Block()
    attach(model)
    loss = model.layers(INPUTS).sum()

    gate.refused = {"backward"}
    with pytest.raises(TransitionRefused):
        loss.backward()

    assert all(gradient is None for gradient in gradients(model).values())


def test_permitted_backward_is_the_same_and_told(gate, attach):
    """Hooks change no bit of the gradients, and the gate learns that there are some."""
    model = Block()
    twin = copy.deepcopy(model)
    attach(model)

    model(INPUTS).square().sum().backward()
    twin(INPUTS).square().sum().backward()

    assert same_gradients(model, gradients(twin))
    assert gate.heard == ["backward"] + ["backward", "backward seen"] * 4


def test_autograd_grad_touches_no_gradient(gate, attach):
    """``torch.autograd.grad`` is asked about like a backward, but leaves nothing behind that a sleep would lose."""
    model = Block()
    attach(model)

    torch.autograd.grad(model(INPUTS).sum(), list(model.parameters()))
    loss = model(INPUTS).sum()
    gate.refused = {"backward"}
    with pytest.raises(TransitionRefused):
        torch.autograd.grad(loss, list(model.parameters()))

    assert "backward seen" not in gate.heard
    assert all(gradient is None for gradient in gradients(model).values())


def test_retained_and_double_backward(gate, attach):
    """A graph may be walked again, and gradients differentiated; each walk is asked about."""
    model = Block()
    twin = copy.deepcopy(model)
    attach(model)

    for one in (model, twin):
        loss = one(INPUTS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        slopes = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()

    assert same_gradients(model, gradients(twin))
    loss = model(INPUTS).square().sum()
    loss.backward(retain_graph=True)
    gate.refused, before = {"backward"}, gradients(model)
    with pytest.raises(TransitionRefused):
        loss.backward()
    assert same_gradients(model, before)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpointed_activations(gate, attach, reentrant, whole):
    """Forwards that run again inside a backward work, and give the gradients they give without hooks."""
    model = Block()
    twin = copy.deepcopy(model)
    attach(model)
    inputs = INPUTS.clone().requires_grad_()

    def loss(one):
        if whole:
            return checkpoint(one, inputs, use_reentrant=reentrant).square().sum()
        first, *rest = one.layers
        one.shape = lambda _: checkpoint(nn.Sequential(*rest), first(inputs), use_reentrant=reentrant)
        return one(inputs).square().sum()

    loss(model).backward()
    loss(twin).backward()
    held = loss(model)
    gate.refused, before = {"backward"}, gradients(model)
    with pytest.raises(TransitionRefused):
        held.backward()

    assert same_gradients(model, gradients(twin))
    assert same_gradients(model, before)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_gradient_checkpointing(gate, attach, tied):
    """A transformers model trains through the hooks as without them."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).train()
    twin = LlamaForCausalLM(config).train()
    twin.load_state_dict(model.state_dict())
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    attach(model)
    tokens = torch.arange(8)[None]

    for one in (model, twin):
        one(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    assert same_gradients(model, gradients(twin))
    assert gate.heard.count("backward seen") == len(list(model.parameters()))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    gate.refused, before = {"backward"}, gradients(model)
    with pytest.raises(TransitionRefused):
        loss.backward()
    assert same_gradients(model, before)


def test_forward_without_gradients_leaves_no_hooks(gate, attach):
    """An output that no backward can reach is left alone."""
    model = Block()
    attach(model)

    with torch.no_grad():
        plain = model(INPUTS)
    with torch.inference_mode():
        model(INPUTS)

    assert plain._backward_hooks is None
    assert gate.heard == []


def test_returned_parameters_collect_no_hooks(gate, attach):
    """A leaf among the outputs outlives the graph, so it is asked about once per backward, by its own hook."""
    model = Block(lambda result: model.layers[0].weight)
    attach(model)

    for _ in range(3):
        out = model(INPUTS)
    out.sum().backward()

    assert gate.heard == ["backward", "backward seen"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use of it
def test_functional_transforms(gate, attach):
    """``functional_call``, ``grad``, ``vmap`` and ``jvp`` work over a hooked model."""
    model = Block()
    attach(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, inputs):
        return torch.func.functional_call(model, weights, (inputs,)).square().sum()

    slopes = torch.func.grad(loss)(weights, INPUTS)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, INPUTS)
    torch.func.jvp(lambda w: loss(w, INPUTS), (weights,), (weights,))
    model(INPUTS).square().sum().backward()

    for name, parameter in model.named_parameters():
        assert torch.allclose(slopes[name], parameter.grad)
        assert torch.allclose(each[name].sum(0), parameter.grad, rtol=1e-4)


def test_unfrozen_parameter_is_heard_after_a_check(gate, attach):
    """A parameter that is unfrozen later is hooked at the next check, once, and stays so when frozen meanwhile."""
    model = nn.Linear(3, 2, bias=False).requires_grad_(False)
    adapter = attach(model)
    adapter.remember()

    model.requires_grad_(True)
    adapter.check()
    model.requires_grad_(False)
    adapter.check()
    model.requires_grad_(True)
    adapter.check()
    nn.functional.linear(INPUTS, model.weight).sum().backward()

    assert gate.heard == ["backward", "backward seen"]
    gate.refused = {"backward"}
    model.weight.grad = None
    with pytest.raises(TransitionRefused):
        nn.functional.linear(INPUTS, model.weight).sum().backward()
    assert model.weight.grad is None


def test_parameter_rebound_by_a_memory_backend_is_still_heard(gate, attach):
    """Moving a parameter's bytes with ``.data`` keeps its hooks."""
    model = nn.Linear(3, 2, bias=False)
    attach(model)

    model.weight.data = model.weight.data.clone()
    gate.refused = {"backward"}
    with pytest.raises(TransitionRefused):
        nn.functional.linear(INPUTS, model.weight).sum().backward()

    assert model.weight.grad is None


def test_a_graph_keeps_neither_model_nor_gate_alive(attach):
    """An output held by the caller holds what its graph holds and no more, and its backward still works."""
    gate, model = Gate(), Block()
    adapter = PlainAdapter(model)
    adapter.install(gate)
    loss = model(INPUTS).sum()
    references = [weakref.ref(thing) for thing in (gate, model, adapter, adapter._hooks)]
    gc.collect()
    gc.disable()
    try:
        del gate, model, adapter
        # The graph holds the parameters, and these their hooks until the graph is gone.
        assert [reference() is None for reference in references] == [True, True, True, False]
        loss.backward()
        del loss
        assert references[-1]() is None
    finally:
        gc.enable()


def test_hooks_without_a_gate_do_nothing(attach):
    """When the controller is gone the model works as if it had never been attached."""
    gate, model = Gate(), Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, gate=gate).guard_released(True)
    held = model(INPUTS).sum()
    gate.refused = {"forward", "backward", "step", "state_dict", "load_state_dict", "optimizer_state_dict"}
    before, told = values(model.layers[0]), gate.heard
    told.clear()

    del gate
    held.backward()
    model(INPUTS).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.load_state_dict(model.state_dict())

    assert told == []
    assert not same(model.layers[0], before)


# -- optimizer steps --------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def take_step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(INPUTS).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_refused_step_writes_nothing(gate, attach, name):
    """A step that is refused leaves every byte of weights, gradients and optimizer state as it was."""
    model = Block()
    optimizer = OPTIMIZERS[name](model.parameters())
    attach(model, optimizer)
    take_step(model, optimizer)
    weights, slopes, state = values(model), gradients(model), copy.deepcopy(optimizer.state_dict())

    gate.refused = {"step"}
    with pytest.raises(TransitionRefused, match="step refused"):
        take_step(model, optimizer)

    assert same(model, weights)
    assert same_gradients(model, slopes)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_announced_before_and_after(gate, attach, name):
    """The gate hears of a step before its closure runs and after the last byte is written."""
    model = Block()
    optimizer = OPTIMIZERS[name](model.parameters())
    attach(model, optimizer)

    take_step(model, optimizer)

    assert gate.heard[0] == "step"
    assert gate.heard[-1] == "step ended"
    assert gate.heard.count("step") == gate.heard.count("step ended") == 1


def test_step_that_fails_is_not_ended(gate, attach):
    """A step that raises has begun and not ended."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)

    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)

    assert gate.heard == ["step"]


def test_foreign_optimizer_is_refused(gate, attach):
    """Another optimizer over one of our parameters, frozen or not, fails before it writes, and the error names them."""
    model = Block()
    model.layers[2].requires_grad_(False)
    attach(model, torch.optim.SGD(model.layers[0].parameters(), lr=0.1))
    model(INPUTS).sum().backward()
    model.layers[2].weight.grad = torch.ones(2, 4)
    foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(1)), model.layers[0].bias, model.layers[2].weight])
    before = values(model)

    with pytest.raises(ManifestError, match=r"another optimizer, AdamW,.*Attach it") as caught:
        foreign.step()

    assert caught.value.problems == ("layers.0.bias", "layers.2.weight")
    assert same(model, before)
    assert not foreign.state
    assert "step" not in gate.heard


def test_two_actors_in_one_process(attach):
    """Each gate hears of its own optimizer alone, and an optimizer that belongs to nobody steps in peace."""
    gates = Gate(), Gate()
    models = Block(), Block()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    adapters = [attach(m, o, gate=g) for m, o, g in zip(models, optimizers, gates, strict=True)]
    free = nn.Parameter(torch.ones(1))
    free.grad = torch.ones(1)

    optimizers[1].step()
    torch.optim.SGD([free], lr=1.0).step()
    gates[1].refused = {"step"}
    optimizers[0].step()

    assert free.item() == 0.0
    assert [gate.heard for gate in gates] == [["step", "step ended"], ["step", "step ended"]]
    adapters[1].remove()
    optimizers[1].step()
    optimizers[0].step()
    assert [len(gate.heard) for gate in gates] == [4, 2]


def test_replaced_parameter_is_no_longer_ours(gate, attach):
    """Whether a parameter is ours is decided by the object, so a new one in a freed one's place is not."""
    model = nn.Linear(3, 2, bias=False)
    attach(model)

    model.weight = nn.Parameter(torch.ones(2, 3))
    model.weight.grad = torch.ones(2, 3)
    torch.optim.SGD(model.parameters(), lr=1.0).step()

    assert torch.equal(model.weight, torch.zeros(2, 3))


def test_process_wide_hooks_go_with_the_last_actor(attach):
    """Nothing of this library is left in PyTorch's global hooks when no actor is."""
    from torch.optim import optimizer as module

    def count():
        return len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks)

    before = count()
    first, second = attach(Block()), attach(Block())
    both = count()
    first.remove()
    one = count()
    second.remove()

    assert both == one == (before[0] + 1, before[1] + 1)
    assert count() == before


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "layers", "layers.0"])
def test_refused_state_dict(gate, attach, path):
    """A state dict of released or foreign bytes is refused, of the model or of any module that has some."""
    model = Block()
    attach(model)
    gate.refused = {"state_dict"}

    with pytest.raises(TransitionRefused, match="state_dict refused"):
        model.get_submodule(path).state_dict()

    assert gate.heard == ["state_dict"]


@pytest.mark.parametrize("path", ["", "layers", "layers.0"])
def test_refused_load_changes_nothing(gate, attach, path):
    """Loading where it is not allowed is refused before the first byte is written."""
    model = Block()
    state = {name: value + 1 for name, value in model.get_submodule(path).state_dict().items()}
    before = values(model)
    attach(model)
    gate.refused = {"load_state_dict"}

    with pytest.raises(TransitionRefused, match="load_state_dict refused"):
        model.get_submodule(path).load_state_dict(state)

    assert gate.heard == ["load_state_dict"]
    assert same(model, before)


def test_one_call_is_asked_about_once(gate, attach):
    """A call walks all modules and is one question; the next call is another, also one from inside a larger model."""
    model = Block()
    outer = nn.ModuleDict({"actor": model, "critic": nn.Linear(1, 1)})
    attach(model)

    state = model.state_dict()
    model.load_state_dict(state)
    model.load_state_dict(state)
    outer.load_state_dict(outer.state_dict())
    model.layers.state_dict()
    model.layers[0].state_dict(prefix="layers.0.")

    assert gate.heard == (
        ["state_dict", "load_state_dict", "load_state_dict"] + ["state_dict", "load_state_dict"] + ["state_dict"] * 2
    )


@pytest.mark.parametrize("later", ["epoch", "guard"])
def test_an_interrupted_state_dict_excuses_no_later_one(gate, attach, later):
    """After a call that raised midway, the next is asked about, and a part of it where the contents may be others."""
    model = Block()
    adapter = attach(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.layers[2].register_state_dict_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    handle.remove()
    gate.refused = {"state_dict"}
    with pytest.raises(TransitionRefused):
        model.state_dict()
    gate.heard.clear()
    if later == "epoch":
        gate.epoch += 1
    else:
        adapter.guard_released(True)

    with pytest.raises(TransitionRefused):
        model.layers[0].state_dict(prefix="layers.0.")
    assert gate.heard == ["state_dict"]


def test_optimizer_state_dicts(gate, attach):
    """Reading and loading optimizer state is asked about first, and a load is told when it is done."""
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    take_step(model, optimizer)
    gate.heard.clear()

    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)

    assert gate.heard == ["optimizer_state_dict", "load_optimizer_state_dict", "optimizer loaded"]
    gate.refused = {"optimizer_state_dict", "load_optimizer_state_dict"}
    before = dict(optimizer.state)
    with pytest.raises(TransitionRefused, match="load_optimizer_state_dict refused"):
        optimizer.load_state_dict(state)
    with pytest.raises(TransitionRefused, match="optimizer_state_dict refused"):
        optimizer.state_dict()
    assert all(optimizer.state[p] is entry for p, entry in before.items())
    assert gate.heard.count("optimizer loaded") == 1


# -- copies, removal, compilation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_not_the_actor(gate, attach, make):
    """A deep copy or an unpickled model (a reference, an average, a worker's) asks nobody and works."""
    model = Block(nn.Identity())
    adapter = attach(model)
    adapter.guard_released(True)
    gate.heard.clear()
    twin = make(model)
    adapter.guard_released(False)
    gate.refused = {"forward", "backward", "step", "state_dict", "load_state_dict"}
    gate.heard.clear()

    twin(INPUTS).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin.load_state_dict(twin.state_dict())

    assert gate.heard == []
    assert all(gradient is None for gradient in gradients(model).values())


def test_an_output_can_be_pickled(attach):
    """The hook on an output does not warn when the output is serialised."""
    model = Block()
    attach(model)

    out = model(INPUTS)

    assert torch.equal(pickle.loads(pickle.dumps(out)), out)


def test_remove_takes_everything_off(gate, attach):
    """Afterwards the model, its optimizer and graphs from before ask nobody; removing again does nothing."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    untouched = {name: dict(vars(module)) for name, module in Block().named_modules()}
    adapter = attach(model, optimizer)
    loss, another = model(INPUTS).sum(), model(INPUTS).sum()
    adapter.guard_released(True)
    gate.refused = {"forward", "backward", "step", "state_dict", "load_state_dict", "optimizer_state_dict"}

    installed, held = adapter.installed(), adapter._hooks
    adapter.remove()
    adapter.remove()
    loss.backward()
    assert held is not None  # a graph may outlive the hooks themselves, or not
    del held
    another.backward()
    model(INPUTS).sum().backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.load_state_dict(model.state_dict())
    optimizer.state_dict()

    assert gate.heard == []
    assert (installed, adapter.installed()) == (True, False)
    for name, module in model.named_modules():
        hooks = {key: value for key, value in vars(module).items() if key.endswith("hooks")}
        assert hooks == {key: untouched[name][key] for key in hooks}
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def test_hooks_make_no_cycles():
    """A hooked model is freed when it and its adapter are dropped, without waiting for the garbage collector."""
    gate, model = Gate(), Block()
    adapter = PlainAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1))
    adapter.install(gate)
    adapter.remember()
    weight = weakref.ref(model.layers[0].weight)
    gc.collect()
    gc.disable()
    try:
        del model, adapter
        assert weight() is None
    finally:
        gc.enable()


@pytest.fixture(name="compiling")
def _compiling():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("how", ["wrapped", "in place", "attached compiled"])
def test_compiled_model(gate, attach, compiling, how):
    """Compiled code trains through the hooks without breaking its graph, and is refused while weights are released."""
    model = Block()
    twin = copy.deepcopy(model)
    if how == "attached compiled":
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        adapter = attach(call)
    else:
        adapter = attach(model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        if how == "in place":
            model.compile(backend="aot_eager", fullgraph=True)
            call = model

    for _ in range(2):
        call(INPUTS).square().sum().backward()
        twin(INPUTS).square().sum().backward()
    trained = gradients(model)
    gate.refused = {"forward", "backward"}
    with pytest.raises(TransitionRefused):
        call(INPUTS).sum().backward()
    adapter.guard_released(True)
    for _ in range(2):
        with pytest.raises(TransitionRefused if how == "attached compiled" else Exception):
            call(INPUTS)
    adapter.guard_released(False)

    torch.testing.assert_close(list(trained.values()), list(gradients(twin).values()))
    assert same_gradients(model, trained)
    assert call(INPUTS).shape == (5, 2)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("function", [True, False])
def test_compiled_model_is_refused_with_our_error(gate, attach, compiling, function):
    """Where the compiler may break the graph, the refusal is ours, also of a compiled function that calls the model."""
    model = Block()
    adapter = attach(model)
    call = torch.compile((lambda inputs: model(inputs).sum()) if function else model, backend="eager")
    call(INPUTS)
    gate.refused = {"forward"}

    adapter.guard_released(True)
    with pytest.raises(TransitionRefused, match="forward refused"):
        call(INPUTS)


@pytest.mark.filterwarnings("default")
def test_sleeping_and_waking_compiles_nothing_again(attach, compiling):
    """Guards that come and go leave the compiled code of the awake model valid."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = Block()
    adapter = attach(model)
    call = torch.compile(model, backend=backend)
    call(INPUTS)

    for _ in range(10):
        adapter.guard_released(True)
        adapter.guard_released(False)
        call(INPUTS)

    assert len(compiled) == 1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("attached_compiled", [True, False])
def test_compiled_backward_over_other_weights(gate, attach, compiling, attached_compiled):
    """A compiled forward whose weights were restored meanwhile gets no gradients: our error, or else autograd's."""
    model = Block()
    call = torch.compile(model, backend="aot_eager")
    attach(call if attached_compiled else model)
    loss = call(INPUTS).square().sum()

    with torch.no_grad():
        model.layers[2].weight.zero_()
    gate.epoch += 1
    with pytest.raises(RuntimeError if not attached_compiled else TransitionRefused):
        loss.backward()

    assert all(gradient is None for gradient in gradients(model).values())
