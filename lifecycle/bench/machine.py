"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("actor-lifecycle", "torch-memory-saver", "triton", "transitions", "transformer-engine")


def machine_facts() -> dict[str, Any]:
    """Device, driver, versions, cores, date: None for what is not there."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{name: _version(name) for name in _PACKAGES},
    }


def machine_in_words(facts: dict[str, Any]) -> str:
    """One line for a title."""
    device = facts["gpu"] or f"CPU, {facts['cores']} cores"
    return f"{device}, torch {facts['torch']}, {facts['date'][:10]}"


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0].strip() if told else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
