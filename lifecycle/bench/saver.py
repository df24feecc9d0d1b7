"""torch-memory-saver as a peer: allocating in pools of its own, with the hook mode that this library settled on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lifecycle.errors import LifecycleError


def missing_saver() -> str | None:
    """Why there is no memory saver here, or None where there is one."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        memory_saver()
    except LifecycleError as error:
        return str(error)
    return None


def memory_saver() -> Any:
    """The process's saver, initialised. Raises LifecycleError where it can not be used."""
    from lifecycle.memory import hook_modes, saver

    saver.ledger()  # decides the hook mode, and lets calls for pools that are not an actor's pass
    return hook_modes.saver_module("benchmarks against the memory saver").torch_memory_saver


@contextmanager
def allocating(tag: str, backup: bool) -> Iterator[Any]:
    """Inside, CUDA memory is allocated in the saver's pool of that tag; gives the saver."""
    saver = memory_saver()
    with saver.region(tag=tag, enable_cpu_backup=backup):
        yield saver
    for key, pool in saver._impl._mem_pools.items():
        if key[0] == tag:  # destroyed at the interpreter's end it would end the process with exit(1)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
