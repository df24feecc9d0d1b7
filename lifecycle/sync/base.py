"""How weights reach an engine: what is sent (UpdateManifest) and by what way (Transport)."""

from __future__ import annotations

from typing import Any, Protocol

from attrs import asdict, frozen


@frozen
class SentTensor:
    """One tensor of an update. ``offset`` counts bytes in segment ``segment``; ``stride`` counts elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    segment: int
    offset: int
    fingerprint: str


@frozen
class UpdateManifest:
    """Everything an update brings, in order. Plain data: it crosses process borders."""

    version: int
    tensors: tuple[SentTensor, ...]

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


class Transport(Protocol):
    """A way for an engine to get at the bytes. Valid until the sync that made it ends."""

    @property
    def name(self) -> str: ...
    @property
    def needs_host_copy(self) -> bool: ...
