"""Messages between two processes: four bytes of length, one JSON object, and file descriptors beside it.

Plain data only. Whatever arrives is either a whole message or an error; nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

#: Bytes of JSON in one message. A length above it means that the two sides are no longer in step.
LIMIT = 256 * 2**20

#: What the kernel takes beside one message (SCM_MAX_FD, https://man7.org/linux/man-pages/man7/unix.7.html).
MAX_FDS = 253

_LENGTH = struct.Struct("!I")
_CHUNK = 2**20


class PeerClosed(ConnectionError):
    """The other side closed the connection, or died."""


class MalformedMessage(ValueError):
    """What arrived is not a message. The connection is of no use any more."""


def send_message(channel: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the peer gets duplicates of ``fds``.

    Raises TypeError or ValueError, with nothing sent, when the message is not plain data or too large, and
    PeerClosed when nobody listens. After any other OSError a part may have been sent: give the connection up.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {LIMIT}")
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} file descriptors are over the limit of {MAX_FDS}")
    header = _LENGTH.pack(len(body))
    try:
        # Descriptors travel with the first byte, so the reader has them before it knows what the message says.
        sent = socket.send_fds(channel, [header], fds) if fds else 0
        channel.sendall(header[sent:] + body)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerClosed("the peer closed the connection") from error


def receive_message(channel: socket.socket, limit: int = LIMIT) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message. The descriptors are the caller's to close; on an error there are none left open.

    Raises PeerClosed at the end of the connection, MalformedMessage on anything that is not a message.
    """
    fds: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_receive_header(channel, fds))
        if length > limit:
            raise MalformedMessage(f"a message of {length} bytes is over the limit of {limit}")
        return _parse(_receive_body(channel, length)), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive_header(channel: socket.socket, fds: list[int]) -> bytes:
    header = b""
    while len(header) < _LENGTH.size:
        try:
            chunk, received, flags, _ = socket.recv_fds(channel, _LENGTH.size - len(header), MAX_FDS)
        except ConnectionResetError as error:
            raise PeerClosed("the peer closed the connection") from error
        fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise MalformedMessage("file descriptors were lost: is this process at its limit of open files?")
        if not chunk:
            raise PeerClosed(f"the peer closed the connection{' in the middle of a message' if header else ''}")
        header += chunk
    return header


def _receive_body(channel: socket.socket, length: int) -> bytearray:
    body = bytearray()
    while len(body) < length:
        try:
            chunk = channel.recv(min(length - len(body), _CHUNK))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise PeerClosed("the peer closed the connection in the middle of a message")
        body += chunk
    return body


def _parse(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not JSON in UTF-8: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage(f"not a JSON object but {type(message).__name__}")
    return message
