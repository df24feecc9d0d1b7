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
    NotBroughtBack,
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
    "NotBroughtBack",
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
def region(name: str, actor: str = "actor", memory: str = "auto", reserve: int = 0) -> Iterator[Region]:
    """Allocate a region's tensors inside, before the actor exists: ``with region("weights"): model = build()``.

    On CUDA with the memory saver they are made in the pool of that region of the actor of this name, on the current
    device, so that attaching moves nothing. ``reserve``: bytes of a piece of memory that is taken first and then cut
    up, such as those of a layer: a sleep and a wake take their time by pieces. A region may be entered any number of
    times, once for each piece. Backends that take tensors from anywhere (``arena``, ``storage``) need no region: for
    them this only checks its arguments. Raises ValueError for a name that is no region or no pool ("workspaces" are
    dropped, not paused) and a reserve that is no number of bytes, TransitionRefused inside another region, NoRoom (a
    MemoryError) where the reserve does not fit, and what ``memory="torch_memory_saver"`` raises where it is no use.
    """
    from lifecycle.memory.choose import allocating

    with allocating(name, actor, memory, reserve) as entered:
        yield entered
