"""The droppers that come with the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lifecycle.workspaces.caches import RotaryCaches
from lifecycle.workspaces.cublas import TorchCublas
from lifecycle.workspaces.transformer_engine import CublasWorkspaces, DummyGradients, QuantisedWeights

if TYPE_CHECKING:
    from torch.nn import Module

    from lifecycle.workspaces.registry import Dropper


def known(roots: Sequence[Module]) -> tuple[Dropper, ...]:
    """Droppers for these modules and what is below them, and for the libraries' scratch memory of the process."""
    own: tuple[Dropper, ...] = (QuantisedWeights(roots), RotaryCaches(roots))
    return (*own, DummyGradients(), CublasWorkspaces(roots), TorchCublas())
