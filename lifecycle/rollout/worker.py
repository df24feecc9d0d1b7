"""The process of a local engine: ``python -m lifecycle.rollout.worker FD PARENT``.

The main thread reads requests and answers at once what must never wait (status, versions, whether a request to
generate is accepted). Every other operation gets a thread of its own, so that one that waits (a pause, an update) holds
up nothing else; answers carry the number of their request and come in any order. One thread generates.

The process lives exactly as long as someone holds the other end of its socket and its parent lives.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lifecycle.errors import EngineError
from lifecycle.rollout.messages import MalformedMessage, PeerClosed, receive_message, send_message

if TYPE_CHECKING:
    from lifecycle.rollout.core import EngineCore
    from lifecycle.rollout.state import Outcome

_PR_SET_PDEATHSIG = 1

#: Operations that may wait or work for long.
_SLOW = frozenset(
    {
        "pause_generation",
        "continue_generation",
        "flush_cache",
        "begin_update",
        "check_weights",
        "end_update",
        "abort_update",
        "release",
        "resume",
    }
)


class Worker:
    """Serves one front over one socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._core: EngineCore | None = None

    def serve(self) -> None:
        """Returns when the front closes the connection; raises MalformedMessage on nonsense."""
        try:
            while True:
                message, fds = receive_message(self._channel)
                self._dispatch(*_unpack(message), fds)
        except PeerClosed:
            return
        finally:
            if self._core is not None:
                self._core.stop()

    def _dispatch(self, number: int, operation: str, arguments: dict[str, Any], fds: list[int]) -> None:
        """Owns the descriptors."""
        if operation == "begin_update":
            arguments["fds"] = fds
        else:
            _close(fds)
        if operation == "generate":
            self._answer(number, lambda: self._admit(number, **arguments), silent=True)
        elif operation in _SLOW:
            work = partial(self._call, operation, arguments)
            threading.Thread(target=self._answer, args=(number, work), name=operation, daemon=True).start()
        else:
            self._answer(number, lambda: self._quick(operation, arguments))

    def _quick(self, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "start":
            return self._start(**arguments)
        if operation == "status":
            return self._ready().status()
        if operation == "weight_version":
            return self._ready().weight_version
        raise ValueError(f"unknown operation {operation!r}")

    def _start(
        self, name: str, config: Mapping[str, Any], attention: str | None, dtype: str, threads: int | None, seed: int
    ) -> None:
        if self._core is not None:
            raise ValueError("it has been started already")
        import torch

        from lifecycle.rollout.core import EngineCore
        from lifecycle.rollout.generation import build_model

        if threads is not None:
            torch.set_num_threads(threads)
        self._core = EngineCore(name, build_model(config, dtype, attention), seed=seed)
        threading.Thread(target=self._core.run, name="generate", daemon=True).start()

    def _admit(self, number: int, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> None:
        self._ready().admit(prompts, options, partial(self._deliver, number))

    def _deliver(self, number: int, outcome: Outcome) -> None:
        if isinstance(outcome, EngineError):
            self._reply(number, error=outcome.reason)
        else:
            self._reply(number, result=outcome)

    def _call(self, operation: str, arguments: dict[str, Any]) -> Any:
        try:
            return getattr(self._ready(), operation)(**arguments)
        finally:
            _close(arguments.get("fds", ()))

    def _ready(self) -> EngineCore:
        if self._core is None:
            raise ValueError("it has not been started")
        return self._core

    def _answer(self, number: int, work: Callable[[], Any], silent: bool = False) -> None:
        """Reply with what ``work`` gives; ``silent``: only if it fails, the answer comes later from elsewhere."""
        try:
            result = work()
        except EngineError as refusal:
            self._reply(number, error=refusal.reason)
        except Exception as failure:
            self._reply(number, error=f"{type(failure).__name__}: {failure}")
        else:
            if not silent:
                self._reply(number, result=result)

    def _reply(self, number: int, **content: Any) -> None:
        with self._sending:
            try:
                send_message(self._channel, {"id": number, **content})
            except PeerClosed:
                return
            except ValueError as too_large:
                send_message(self._channel, {"id": number, "error": str(too_large)})


def _unpack(message: Mapping[str, Any]) -> tuple[int, str, dict[str, Any]]:
    number, operation, arguments = (message.get(key) for key in ("id", "op", "args"))
    if not (isinstance(number, int) and isinstance(operation, str) and isinstance(arguments, dict)):
        raise MalformedMessage(f"a request needs id, op and args, not {sorted(message)}")
    return number, operation, arguments


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, and go now if it is already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, parent: int) -> None:
    """Never returns: an orderly exit would wait for threads that are in the middle of a token."""
    _die_with(parent)
    faulthandler.enable()
    try:
        Worker(socket.socket(fileno=fd)).serve()
    except MalformedMessage as problem:
        print(f"the front sent a malformed message: {problem}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
