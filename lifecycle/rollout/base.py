"""What a rollout engine must do. Messages between processes are plain data, never pickle.

An engine holds one version or none. From ``begin_update`` until ``end_update`` it holds none and generates nothing;
``abort_update``, or a death, leaves it with none. It is paused, released and resumed by its owner (the trainer's loop),
except that a sync pauses it before and continues it after.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from lifecycle.sync.base import Transport, UpdateManifest

PauseMode = Literal["abort", "wait", "keep"]
POOLS = ("weights", "kv_cache")


class RolloutEngine(Protocol):
    """One engine, or a group of them behind one front. Every method raises EngineError on refusal, failure or death."""

    name: str
    transports: tuple[str, ...]  # names of the transports it can take weights by, best first

    @property
    def weight_version(self) -> int | None:
        """The version it generates with, or None: nothing yet, or a half-received update."""
        ...

    def pause_generation(self, mode: PauseMode = "abort") -> None: ...

    def continue_generation(self) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_update(self, manifest: UpdateManifest, transport: Transport) -> None:
        """From here on it holds no version. Refused while its weights pool is released or an update is open."""
        ...

    def receive(self, bucket: Any) -> None:
        """One bucket, for transports that push; engines that read by themselves refuse it."""
        ...

    def check_weights(self, fingerprints: Mapping[str, str]) -> tuple[str, ...]:
        """Names whose bytes in the engine differ from these fingerprints, or which it lacks."""
        ...

    def end_update(self, version: int) -> None:
        """Takes the version, if every name of its model came; else refused, and it still holds none."""
        ...

    def abort_update(self) -> None:
        """Ends an open update, if any, with no version, paused. Safe to call at any time."""
        ...

    def release(self, pools: Collection[str] = POOLS) -> None: ...

    def resume(self, pools: Collection[str] = POOLS) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """Refused while paused, released, or without a version."""
        ...
