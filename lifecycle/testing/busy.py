"""An adapter with what plain PyTorch lacks: workspaces of real bytes, process groups that count, graphs by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lifecycle.adapters.plain import PlainAdapter


class BusyAdapter(PlainAdapter):
    """``workspaces`` are int8 images of the parameters, made by ``quantise``; groups refuse being taken down twice."""

    name = "busy"

    def __init__(self, model: Module | Sequence[Module], optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.workspaces: dict[str, Tensor] = {}
        self.captured = False
        self.groups = True
        self.group_cycles = 0
        self.settled = 0

    def quantise(self) -> None:
        for owned in self.tensors():
            self.workspaces[owned.name] = owned.tensor.detach().to(torch.int8)

    def workspace_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.workspaces.values())

    def drop_workspaces(self) -> int:
        assert not self.captured, "dropped workspaces under captured graphs"
        freed = self.workspace_bytes()
        self.workspaces.clear()
        return freed

    def graphs_captured(self) -> bool:
        return self.captured

    def has_groups(self) -> bool:
        return True

    def groups_up(self) -> bool:
        return self.groups

    def suspend_groups(self) -> None:
        assert self.groups, "groups are down already"
        self.groups = False

    def reload_groups(self) -> None:
        assert not self.groups, "groups are up already"
        self.groups = True
        self.group_cycles += 1

    def settle(self) -> None:
        self.settled += 1
