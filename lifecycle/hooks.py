"""Where plain PyTorch asks the controller before it reads or writes an actor's bytes.

Every hook holds its gate, modules and parameters weakly: a hook keeps neither a model nor a controller alive, and one
whose gate is gone, or that was copied along with a model, does nothing.

[Note: compiled models]
Code compiled by ``torch.compile`` does not see hooks that were added to a module after it was traced
(https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html). So each root has one forward pre-hook that is
always on and reads one flag, which compiled code guards on: a root is refused while the weights are released also
where a compiled function calls it (with ``fullgraph=True`` by the compiler's own error). A submodule that compiled
code calls without its root is not guarded, nor is a root in a function that was compiled before it was attached: such
code must not run while weights are released, nor before the bytes of a streamed wake are there. The output hooks are
left out of compiled code, because they would break its graph: a compiled model whose weights were overwritten between
forward and backward gets autograd's own version error instead of ours, unless what was attached is what
``torch.compile(model)`` returned.

``torch.nn.DataParallel`` is not supported: its replicas share the hooks and not the parameters.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle, unserializable_hook

from lifecycle.errors import ManifestError, TransitionRefused

if TYPE_CHECKING:
    from torch import Tensor

    from lifecycle.adapters.base import Gate


_BEGINS, _NEEDS_ALL = -1, -2  # a forward while weights are on their way; other numbers are those of blocks


class Hooks:
    """All hooks of one actor.

    ``roots`` are the modules that users call, ``modules`` every module that reads owned tensors when it is called by
    itself, ``optimizers`` the attached ones, ``parameters`` by name what they or a backward may write.
    """

    def __init__(
        self,
        roots: Sequence[Module] = (),
        modules: Iterable[Module] = (),
        optimizers: Iterable[Optimizer] = (),
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        distinct = {id(module): module for module in chain(roots, modules)}
        self._roots = [weakref.ref(root) for root in roots]
        self._modules = [weakref.ref(module) for module in distinct.values()]
        self._optimizers = weakref.WeakSet(optimizers)
        self._names = {id(tensor): name for name, tensor in (parameters or {}).items()}
        self._parameters = weakref.WeakValueDictionary({id(t): t for t in (parameters or {}).values()})
        self._unheard: list[weakref.ref[Tensor]] = [*self._parameters.valuerefs()]  # whose backward no hook hears yet
        self._gate: Callable[[], Gate | None] = _no_gate
        self._handles: list[RemovableHandle] = []
        self._guards: list[RemovableHandle] = []
        self._waits: list[RemovableHandle] = []
        self._released = self._arriving = self._streaming = False
        self._begun = False  # whether a root was called since weights are on their way
        self._saving: tuple[int, str, int] | None = None
        self._loading: list[str] | None = None

    def __reduce__(self) -> tuple[Callable[[], Hooks], tuple[()]]:
        # A deep copy of the model (a reference model, an EMA) is not this actor: its hooks must not ask our gate. The
        # copy itself reads the weights, and so does a pickle.
        if self._released:
            self._ask("forward")
        if self._arriving:
            self._outside(_NEEDS_ALL)
        return Hooks, ()

    def install(self, gate: Gate) -> None:
        """Put every hook on, except the forward guards of released weights."""
        self._gate = weakref.ref(gate)
        for root in _alive(self._roots):
            self._put(root.register_forward_pre_hook, self._root_called)
            self._put(root.register_forward_hook, self._root_returned)
        for module in _alive(self._modules):
            self._put(module.register_state_dict_pre_hook, self._saving_begins)
            self._put(module.register_state_dict_post_hook, partial(self._saving_ends))
            self._put(module.register_load_state_dict_pre_hook, self._load)
        for optimizer in self._optimizers:
            self._put(optimizer.register_state_dict_pre_hook, self._optimizer_saves)
            self._put(optimizer.register_load_state_dict_pre_hook, self._optimizer_loads)
            self._put(optimizer.register_load_state_dict_post_hook, self._optimizer_loaded)
        self.listen()
        _watch_steps(self)

    def remove(self) -> None:
        """Take every hook off; graphs of earlier forwards ask nobody from here on. May be called again."""
        self._gate = _no_gate
        self.guard(False)
        self.expect(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unheard = [*self._parameters.valuerefs()]
        _unwatch_steps(self)

    def guard(self, released: bool) -> None:
        """While weights are released, refuse the forward of every module before anything else of it runs."""
        if released and not self._guards:
            guards = [m.register_forward_pre_hook(self._module_called, prepend=True) for m in _alive(self._modules)]
            self._guards.extend(guards)
        elif not released:
            for handle in self._guards:
                handle.remove()
            self._guards.clear()
        self._released = released
        self._saving = None

    def expect(self, waits: Sequence[tuple[int, Module]] | None) -> None:
        """Weights are on their way, until this is called with None; these modules wait for the blocks of their numbers.

        The first of a streamed wake's blocks is there already. A part of a model that is not streamed may be called
        without its root.
        """
        for handle in self._waits:
            handle.remove()
        self._waits.clear()
        self._arriving, self._streaming, self._begun = waits is not None, bool(waits), False
        for number, module in waits or ():
            self._await_in(module, partial(self._block_called, number))
        if self._arriving and not self._streaming:
            for module in set(_alive(self._modules)).difference(_alive(self._roots)):
                self._await_in(module, self._part_called)

    def _await_in(self, module: Module, hook: Callable[[Module, Any], None]) -> None:
        self._waits.append(module.register_forward_pre_hook(hook, prepend=True))

    def _block_called(self, number: int, module: Module, args: Any) -> None:
        self._outside(number)

    def _part_called(self, module: Module, args: Any) -> None:
        self._outside(_BEGINS)

    def _outside(self, what: int) -> None:
        """Tell the gate, out of sight of a compiler, which may have been imported since the wake."""
        (_unseen() if "torch._dynamo" in sys.modules else _tell)(self._gate(), what)

    _outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable() marks functions

    def listen(self) -> None:
        """Hear the backward of every parameter that needs a gradient, also of those unfrozen since the last call.

        What an operation under autograd wrote, such as a recurrent buffer, is no leaf: it is given no gradient.
        """
        parameters = [tensor for reference in self._unheard if (tensor := reference()) is not None]
        self._unheard = []
        for tensor in parameters:
            if tensor.requires_grad and tensor.is_leaf:
                self._put(tensor.register_hook, self._gradient_arrives)
                self._put(tensor.register_post_accumulate_grad_hook, self._gradient_written)
            else:
                self._unheard.append(weakref.ref(tensor))

    def _put(self, register: Callable[..., RemovableHandle], hook: Callable[..., Any]) -> None:
        self._handles.append(register(hook))

    # -- forward and backward -------------------------------------------------------------------------------------

    def _ask(self, operation: str) -> None:
        gate = self._gate()
        if gate is not None:
            gate.permit(operation)

    def _root_called(self, module: Module, args: Any) -> None:
        if self._released:  # see [Note: compiled models]
            self._ask("forward")
        if self._arriving:
            # Compiled code calls no other hook; and one forward is enough to hide the copy.
            if torch.compiler.is_compiling() or self._begun or (self._streaming and _under_compiler()):
                self._outside(_NEEDS_ALL)
            else:
                self._begun = True
                self._outside(_BEGINS)

    def _module_called(self, module: Module, args: Any) -> None:
        self._ask("forward")

    def _root_returned(self, module: Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        gate = self._gate()
        if gate is None:
            return
        arrival = _Arrival(weakref.ref(self), gate.content_epoch())
        for tensor in _tensors(output):
            # A leaf here is a parameter or the caller's own input: it outlives the graph, and would collect hooks.
            if tensor.grad_fn is not None:
                register: Callable[..., RemovableHandle] = tensor.register_hook
                register(arrival)

    def backward_arrives(self, epoch: int) -> None:
        """A backward reaches an output of a forward that ran in that epoch.

        Raises TransitionRefused where a backward is not allowed now, or the weights are not those of the forward.
        """
        gate = self._gate()
        if gate is None:
            return
        gate.permit("backward")
        if gate.content_epoch() != epoch:
            raise TransitionRefused(
                "backward",
                "a graph of earlier weights",
                ("forward",),
                "the weights were switched or restored between forward and backward",
                "Run the forward again, then its backward.",
            )

    def _gradient_arrives(self, gradient: Tensor) -> None:
        self._ask("backward")

    def _gradient_written(self, parameter: Tensor) -> None:
        gate = self._gate()
        if gate is not None:
            gate.backward_seen()

    # -- state dicts ----------------------------------------------------------------------------------------------

    def _saving_begins(self, module: Module, prefix: str, keep_vars: bool) -> None:
        gate = self._gate()
        if gate is None:
            return
        epoch = gate.content_epoch()
        if self._saving is not None:
            _, outer, asked = self._saving
            # The epoch and guard() bound what a call that raised, and so never ended, can still excuse.
            if epoch == asked and prefix != outer and prefix.startswith(outer):
                return
        gate.permit("state_dict")
        self._saving = id(module), prefix, epoch

    def _saving_ends(self, module: Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        if self._saving is not None and self._saving[0] == id(module):
            self._saving = None

    def _load(
        self, module: Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *_: Any
    ) -> None:
        # One load_state_dict() call hands one list of missing keys to all its modules.
        if missing is not self._loading:
            self._ask("load_state_dict")
            self._loading = missing

    def _optimizer_saves(self, optimizer: Optimizer) -> None:
        self._ask("optimizer_state_dict")

    def _optimizer_loads(self, optimizer: Optimizer, state_dict: Any) -> None:
        self._ask("load_optimizer_state_dict")

    def _optimizer_loaded(self, optimizer: Optimizer) -> None:
        gate = self._gate()
        if gate is not None:
            gate.optimizer_loaded()

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_begins(self, optimizer: Optimizer) -> None:
        """Some optimizer of this process is about to step.

        Raises what the gate raises for an attached one, ManifestError for another one that holds our parameters.
        """
        gate = self._gate()
        if gate is None:
            return
        if optimizer in self._optimizers:
            gate.step_begins()
            return
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        shared = [self._names[id(p)] for p in params if id(p) in self._parameters]
        if shared:
            what = f"another optimizer, {type(optimizer).__name__}, would write this actor's parameters"
            advice = "Attach it: close() this actor, then ActorLifecycle(model, optimizer=...) with it."
            raise ManifestError(what, shared, advice)

    def step_ends(self, optimizer: Optimizer) -> None:
        """Some optimizer of this process has stepped."""
        gate = self._gate()
        if gate is not None and optimizer in self._optimizers:
            gate.step_ends()


@unserializable_hook
@frozen
class _Arrival:
    """The hook on an output tensor. Lives as long as its graph, so it holds everything weakly."""

    hooks: weakref.ref[Hooks]
    epoch: int

    def __call__(self, gradient: Tensor) -> None:
        hooks = self.hooks()
        if hooks is not None:
            hooks.backward_arrives(self.epoch)


def _no_gate() -> None:
    return None


def _tell(gate: Gate | None, what: int) -> None:
    if gate is None:
        return
    # What waits reads bytes: the caller's transforms (torch.func) and modes (fake tensors, export) are not for it.
    with torch._C._DisableFuncTorch(), _disable_current_modes():
        if what == _BEGINS:
            gate.forward_begins()
        elif what == _NEEDS_ALL:
            gate.arrive()
        else:
            gate.block_begins(what)


@cache
def _unseen() -> Callable[[Gate | None, int], None]:
    """One for all: the compiler keeps what it was told to leave alone, and would keep the hooks along with it."""
    return torch.compiler.disable(_tell)  # type: ignore[no-any-return, no-untyped-call]


def _under_compiler() -> bool:
    """Whether what is called now belongs to compiled code, though this very call was left to Python."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    return frames is not None and frames.get_eval_frame_callback() is not None


def _alive(modules: Iterable[weakref.ref[Module]]) -> Iterator[Module]:
    return (module for reference in modules if (module := reference()) is not None)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from chain.from_iterable(map(_tensors, output.values()))
    elif isinstance(output, list | tuple):
        yield from chain.from_iterable(map(_tensors, output))
    elif is_dataclass(output) and not isinstance(output, type):
        yield from chain.from_iterable(_tensors(getattr(output, field.name)) for field in fields(output))


# One pair of hooks for all actors: PyTorch calls them around every step of every optimizer in the process.
_watching: weakref.WeakSet[Hooks] = weakref.WeakSet()
_step_handles: list[RemovableHandle] = []
_lock = threading.Lock()


def _watch_steps(hooks: Hooks) -> None:
    with _lock:
        _watching.add(hooks)
        if not _step_handles:
            _step_handles.append(register_optimizer_step_pre_hook(_before_step))
            _step_handles.append(register_optimizer_step_post_hook(_after_step))


def _unwatch_steps(hooks: Hooks) -> None:
    with _lock:
        _watching.discard(hooks)
        if not _watching:
            for handle in _step_handles:
                handle.remove()
            _step_handles.clear()


def _watchers() -> tuple[Hooks, ...]:
    with _lock:
        return tuple(_watching)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _watchers():
        hooks.step_begins(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _watchers():
        hooks.step_ends(optimizer)
