"""What was copied between device and host, counted by torch's profiler: the driver's own account of every copy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen

SMALL = 64 * 2**10  # bytes; a copy below is a fingerprint's result or a kernel's table, no weights


@frozen
class Copied:
    """Bytes each way in copies of at least ``SMALL`` bytes; those in smaller ones, and how many these were."""

    out: int = 0
    into: int = 0
    small_out: int = 0
    small_into: int = 0
    small_copies: int = 0

    @property
    def total(self) -> int:
        return self.out + self.into

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def copied_during(call: Callable[[], object]) -> Copied:
    """Run it, and count. Needs CUDA. Raises RuntimeError where the profiler's events do not say how many bytes."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return count(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def count(events: Iterable[Mapping[str, Any]]) -> Copied:
    """From the events of a trace: ``Memcpy DtoH (Device -> Pinned)`` and the like, with ``bytes`` in their ``args``."""
    out = into = small_out = small_into = small = 0
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") != "gpu_memcpy" or not ("DtoH" in name or "HtoD" in name):
            continue
        nbytes = _nbytes(event)
        outwards = "DtoH" in name
        if nbytes < SMALL:
            small += 1
            small_out, small_into = small_out + nbytes * outwards, small_into + nbytes * (not outwards)
        else:
            out, into = out + nbytes * outwards, into + nbytes * (not outwards)
    return Copied(out, into, small_out, small_into, small)


def _nbytes(event: Mapping[str, Any]) -> int:
    try:
        return int(event["args"]["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        found = event.get("args")
        raise RuntimeError(f"the profiler's event {event.get('name')!r} does not tell its bytes: {found}") from error
