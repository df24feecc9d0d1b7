"""What takes long in C, done by a thread while Python goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def beside(call: Callable[[], None]) -> Future[None]:
    """Run it in the process's one thread for this, on the caller's CUDA device.

    It runs when this returns: else the thread would have to wait until the caller lets go of Python's lock, which it
    may do milliseconds later. Raises RuntimeError where there is no thread to be had, or it is at work, which may be
    for somebody whom the caller holds up; nothing runs then.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    begun = threading.Lock()
    begun.acquire()
    done = _thread().submit_alone(lambda: _run(call, device, begun))
    begun.acquire()
    return done


def behind(call: Callable[[], T]) -> Future[T]:
    """Run it in the same thread, on the same device, when what was begun there has ended. Raises RuntimeError where
    there is no thread any more."""
    return _thread().submit(call)


def _run(call: Callable[[], None], device: int | None, begun: threading.Lock) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
    finally:
        begun.release()
    call()


class _Thread:
    """Runs calls one after the other.

    Started at once. Where the system has no thread to give that fails here, and nothing stays queued for later.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lifecycle-beside")
        self._lock = threading.Lock()
        self._latest: Future[Any] = self._pool.submit(int)
        self._latest.result()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        with self._lock:
            done = self._latest = self._pool.submit(call)
        return done

    def submit_alone(self, call: Callable[[], T]) -> Future[T]:
        """Raises RuntimeError where it has other work."""
        with self._lock:
            if not self._latest.done():
                raise RuntimeError("the thread is at work")
            done = self._latest = self._pool.submit(call)
        return done


@cache
def _thread() -> _Thread:
    """Kept: starting one takes as long as much of what is done beside it."""
    return _Thread()
