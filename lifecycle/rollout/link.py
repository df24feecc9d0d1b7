"""The parent's side of a worker process: start it, call it, notice its death, end it.

Theory of operation. One thread per process starts it, reads its replies until the connection ends, and collects its
exit. It is the starter too, because the kernel sends the parent-death signal when the *thread* that started a process
ends (https://man7.org/linux/man-pages/man2/pr_set_pdeathsig.2const.html): an engine made in a short-lived thread would
die with it. Calls from any thread write a numbered request and wait for their own reply.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from lifecycle.errors import EngineError
from lifecycle.rollout.messages import MalformedMessage, receive_message, send_message

#: Seconds from the end of the connection until a process that still runs is killed.
_LAST_WORDS = 5.0

#: Bytes of the process's stderr that go into an error.
_TAIL = 4000


class WorkerLink:
    """One process and the socket to it. Once it is dead or closed it stays so."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], send_timeout: float) -> None:
        """Start ``command``, with the number of its socket's descriptor and our process id appended.

        Raises EngineError when there is no such program.
        """
        self.name = name
        self.owner = os.getpid()
        # Re-entrant: a finalizer that closes this may run in the middle of any of its own methods.
        self._lock = threading.RLock()
        self._sending = threading.RLock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._closing = False
        self._nonsense = ""
        self._death: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (read as long as the link lives)
        self._channel, theirs = socket.socketpair()
        seconds, fraction = divmod(send_timeout, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        born: Future[subprocess.Popen[bytes]] = Future()
        arguments = [*command, str(theirs.fileno()), str(self.owner)]
        self._thread = threading.Thread(
            target=self._live, args=(arguments, dict(environment), theirs, born), name=f"engine {name}", daemon=True
        )
        self._thread.start()
        try:
            self._process = born.result()
        except OSError as error:
            raise EngineError(name, "start", f"can not run {command[0]!r}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether calls have a chance; never true in a forked child."""
        return os.getpid() == self.owner and self._death is None and not self._closing

    def call(self, operation: str, arguments: Mapping[str, Any], timeout: float, fds: Sequence[int] = ()) -> Any:
        """Send one request, wait for its reply, and return its result. Raises EngineError on anything else.

        After a timeout the request may still be carried out; its reply is dropped.
        """
        self.require_owner(operation)  # before the lock: a fork may have copied it while it was held
        reply: Future[Mapping[str, Any]] = Future()
        with self._lock:
            self.require_usable(operation)
            number = next(self._numbers)
            self._waiting[number] = reply
        try:
            self._send(number, operation, arguments, fds)
            message = reply.result(timeout)
        except TimeoutError:
            raise EngineError(self.name, operation, f"no answer within {timeout:g} s; it may still be at it") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in message:
            raise EngineError(self.name, operation, message["error"])
        return message["result"]

    def close(self, grace: float = _LAST_WORDS) -> None:
        """End the process: hang up, then terminate, then kill, ``grace`` seconds apart. Nothing in a forked child."""
        if os.getpid() != self.owner:
            return
        self._closing = True
        if threading.current_thread() is self._thread:
            # A finalizer on the reading thread; it can not wait for itself.
            self._process.kill()
            return
        for end in (self._hang_up, self._process.terminate, self._process.kill):
            end()
            self._thread.join(grace)
            if not self._thread.is_alive():
                return

    def require_owner(self, operation: str) -> None:
        """Raise EngineError in a forked child: two processes on one connection would take each other's replies."""
        if os.getpid() != self.owner:
            raise EngineError(
                self.name, operation, f"this is a forked child's copy; only process {self.owner} may use the engine"
            )

    def require_usable(self, operation: str) -> None:
        """Raise EngineError when the process has ended, saying how."""
        self.require_owner(operation)
        if self._death is not None:
            raise EngineError(self.name, operation, self._death)

    def _send(self, number: int, operation: str, arguments: Mapping[str, Any], fds: Sequence[int]) -> None:
        message = {"id": number, "op": operation, "args": arguments}
        try:
            with self._sending:
                send_message(self._channel, message, fds)
        except (TypeError, ValueError) as error:
            raise EngineError(self.name, operation, f"can not be sent: {error}") from error
        except OSError:
            # Closed by the peer, or half a message sent in the time allowed: it ends here, the reader tells how.
            self._process.kill()

    def _hang_up(self) -> None:
        with self._lock:
            if self._death is None:
                with suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)

    # Below: on the link's own thread.

    def _live(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        theirs: socket.socket,
        born: Future[subprocess.Popen[bytes]],
    ) -> None:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=environment,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # the terminal's Ctrl-C is for the parent to handle
            )
        except BaseException as error:
            self._channel.close()
            self._stderr.close()
            born.set_exception(error)
            return
        finally:
            theirs.close()
        born.set_result(process)
        try:
            self._read()
        finally:
            self._bury(process)

    def _read(self) -> None:
        try:
            while True:
                message, fds = receive_message(self._channel)
                for fd in fds:
                    os.close(fd)
                number = message.get("id")
                if not isinstance(number, int) or not message.keys() & {"result", "error"}:
                    raise MalformedMessage(f"a reply needs id and result or error, not {sorted(message)}")
                reply = self._waiting.pop(number, None)
                if reply is not None:
                    reply.set_result(message)
        except OSError:
            return
        except MalformedMessage as error:
            self._nonsense = f"it sent a malformed message ({error}) and was killed"

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        if self._nonsense:
            process.kill()
        try:
            code = process.wait(_LAST_WORDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        with self._lock:
            self._death = "it was closed" if self._closing else self._obituary(process.pid, code)
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._channel.close()
            self._stderr.close()
        for reply in waiting:
            reply.set_result({"error": self._death})

    def _obituary(self, pid: int, code: int) -> str:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        ended = f"killed by {name}" if code < 0 else f"exited with code {code}"
        told = self._nonsense or f"its process {pid} died ({ended})"
        tail = self._tail()
        return f"{told}; restart() starts a fresh one." + (f" Its last words:\n{tail}" if tail else "")

    def _tail(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
