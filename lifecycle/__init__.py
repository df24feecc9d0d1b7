"""actor-lifecycle: the life cycle of a training actor in RL post-training, as one declared state machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lifecycle.config import LifecycleConfig
from lifecycle.controller import ActorLifecycle, SyncReport
from lifecycle.errors import (
    EffectFailed,
    EngineError,
    Faulted,
    LifecycleError,
    ManifestError,
    MissingExtra,
    NoReadableCopy,
    RanksDisagree,
    SyncFailed,
    TransitionRefused,
    UnknownTag,
    UntrackedChange,
    VerificationFailed,
)
from lifecycle.own import EffectCall
from lifecycle.plan import ActorState as State
from lifecycle.plan import Plan
from states.resources import Copy, Region

__all__ = [
    "ActorLifecycle",
    "Copy",
    "EffectCall",
    "EffectFailed",
    "EngineError",
    "Faulted",
    "LifecycleConfig",
    "LifecycleError",
    "ManifestError",
    "MissingExtra",
    "NoReadableCopy",
    "Plan",
    "RanksDisagree",
    "Region",
    "State",
    "SyncFailed",
    "SyncReport",
    "TransitionRefused",
    "UnknownTag",
    "UntrackedChange",
    "VerificationFailed",
    "region",
]


@contextmanager
def region(name: str) -> Iterator[Region]:
    """Allocate a region's tensors inside, before the actor exists.

    Backends that move memory at attach (``arena``) take tensors from anywhere, so for them this only checks the name.
    Raises ValueError for a name that is no region.
    """
    yield Region(name)
