"""What an adapter must do: know one training framework's tensors, gradients, groups and hooks.

The adapter finds and names things; it moves no bytes (memory backends do) and knows no states (the table does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from states.resources import Region, Slot

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class OwnedTensor:
    """A tensor the actor owns and where it belongs."""

    name: str
    tensor: Tensor
    region: Region
    slot: Slot


class Gate(Protocol):
    """What hooks ask and tell. Implemented by the controller; hooks hold it weakly."""

    def permit(self, operation: str) -> None:
        """Raise TransitionRefused (or Faulted) unless the table allows this operation now.

        Operations: ``forward``, ``backward``, ``step``, ``state_dict``, ``load_state_dict``,
        ``optimizer_state_dict``, ``load_optimizer_state_dict``.
        """
        ...

    def forward_begins(self) -> None:
        """A root module is called while weights are on their way."""
        ...

    def block_begins(self, number: int) -> None:
        """Block ``number`` of a streamed wake is called; returns when its weights are there."""
        ...

    def arrive(self) -> None:
        """Wait for all weights that are on their way: for code that hooks on blocks do not reach."""
        ...

    def content_epoch(self) -> int:
        """A number that changes whenever the device's weights are overwritten by the controller."""
        ...

    def backward_seen(self) -> None: ...

    def step_begins(self) -> None:
        """Before an optimizer step: refused, or outside a phase the start of an implicit one."""
        ...

    def step_ends(self) -> None: ...

    def optimizer_loaded(self) -> None:
        """After optimizer.load_state_dict: its state tensors are new objects."""
        ...


class Adapter(Protocol):
    """One model (with its optimizers) in one framework. Methods run on the event's thread, on every rank."""

    name: str

    def tensors(self) -> tuple[OwnedTensor, ...]:
        """Every tensor of regions ``weights`` and ``rest``, in a stable order, aliases included.

        Raises ManifestError naming each tensor that belongs to no region and was not waived.
        """
        ...

    def weight_names(self) -> frozenset[str]:
        """Those names of ``tensors`` that a checkpoint has: parameters and persistent buffers, tied names included."""
        ...

    def has_optimizer(self) -> bool: ...

    def optimizer_tensors(self) -> tuple[OwnedTensor, ...]:
        """Every tensor of optimizer state that exists now, in a stable, append-only order."""
        ...

    def remember(self) -> None:
        """Take the present structure as the attached one."""
        ...

    def check(self) -> None:
        """Raise ManifestError naming what was added, removed, replaced, re-tied, cast or reshaped since."""
        ...

    def optimizer_skeleton(self) -> Any:
        """All of the optimizer state but the bytes of its tensors: entries, plain values, and which tensor is where."""
        ...

    def rebuild_optimizer(self, skeleton: Any) -> None:
        """Put entries, plain values and tensors (these very objects) back to where ``skeleton`` found them."""
        ...

    def grad_bytes(self) -> int: ...

    def discard_grads(self) -> int:
        """Drop all gradients, remembering which parameters had one. Returns the bytes."""
        ...

    def zero_grads(self) -> int:
        """Zero gradients for those parameters whose gradient was discarded and is still absent. Returns the bytes."""
        ...

    def workspace_bytes(self) -> int:
        """Bytes that ``drop_workspaces`` would give back, as far as they are known; changes nothing and is cheap.

        A workspace is what the next use makes again, bit for bit, from weights and inputs. Raises WorkspacesLeft naming
        what could not be asked.
        """
        ...

    def drop_workspaces(self) -> int:
        """Drop them; never called while ``graphs_captured``. Returns the bytes given back.

        Raises WorkspacesLeft naming those that could not be dropped; the others are dropped all the same.
        """
        ...

    def graphs_captured(self) -> bool:
        """Whether captured device graphs are alive, whose addresses must stay; unknown counts as True.

        Asked at every sleep: cheap.
        """
        ...

    def workspaces_dropped(self) -> tuple[tuple[str, int], ...]:
        """What the last ``drop_workspaces`` dropped: name and bytes of each."""
        ...

    def why_graphs(self) -> str:
        """Why ``graphs_captured`` says what it says, in words."""
        ...

    def has_groups(self) -> bool: ...

    def groups_up(self) -> bool:
        """Whether the groups are up now; asked anew when an effect failed half-way."""
        ...

    def suspend_groups(self) -> None: ...

    def reload_groups(self) -> None: ...

    def settle(self) -> None:
        """Wait for asynchronous readers and writers of the actor's memory (checkpoint writers, offload streams)."""
        ...

    def install(self, gate: Gate) -> None:
        """Install the hooks; called once, at attach."""
        ...

    def installed(self) -> bool: ...

    def guard_released(self, released: bool) -> None:
        """Weights are released (or back): while they are, a forward of any module must be refused first."""
        ...

    def blocks(self) -> tuple[frozenset[str], ...]:
        """Names of weights in the order in which a forward needs them; none where hooks could not tell who needs what.

        A block is a layer with its whole subtree; it reads no weights of another one but of the first, which has what
        comes before the layers too. What comes after them is in the middle one, and every later one waits for that too.
        """
        ...

    def guard_arriving(self, blocks: bool | None) -> None:
        """Weights are on their way: forwards ask the gate first, with ``blocks`` before each block. None: all came."""
        ...

    def remove(self) -> None:
        """Take every hook off."""
        ...


AnyModel = Any
