"""What takes long in C, done by a thread while Python goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def beside(call: Callable[[], None]) -> Future[None]:
    """Run it in the process's one thread for this, on the caller's CUDA device. Calls run one after the other.

    It runs when this returns: else the thread would have to wait until the caller lets go of Python's lock, which it
    may do milliseconds later. Raises RuntimeError where there is no thread to be had; nothing runs then.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    begun = threading.Lock()
    begun.acquire()
    done = _thread().submit(_run, call, device, begun)
    begun.acquire()
    return done


def behind(call: Callable[[], T]) -> Future[T]:
    """Run it in the same thread, on the same device, when what was begun there has ended. Raises as ``beside``."""
    return _thread().submit(call)


def _run(call: Callable[[], None], device: int | None, begun: threading.Lock) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
    finally:
        begun.release()
    call()


@cache
def _thread() -> ThreadPoolExecutor:
    """Kept: starting one takes as long as much of what is done beside it.

    Started at once. Where the system has none to give that fails here, and nothing stays queued for later.
    """
    made = ThreadPoolExecutor(1, thread_name_prefix="lifecycle-beside")
    made.submit(int).result()
    return made
