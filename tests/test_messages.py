"""Messages between the engine's two processes arrive whole, or as an error that says what is wrong."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest

from lifecycle.rollout import messages
from lifecycle.rollout.messages import MAX_FDS, MalformedMessage, PeerClosed, receive_message, send_message


@pytest.fixture(name="pair")
def _pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def framed(body):
    return struct.pack("!I", len(body)) + body


def test_arrives_as_it_was_sent(pair):
    """A message arrives equal, and messages keep their order."""
    sent = [{"id": 1, "args": {"prompts": [[1, 2]], "text": "Grüße"}}, {"id": 2}]
    for message in sent:
        send_message(pair[0], message)
    assert [receive_message(pair[1]) for _ in sent] == [(message, []) for message in sent]


def test_large_message_arrives_in_pieces(pair):
    """A message larger than any socket buffer arrives whole."""
    message = {"id": 1, "text": "x" * 5_000_000}
    sender = threading.Thread(target=send_message, args=(pair[0], message))
    sender.start()
    assert receive_message(pair[1]) == (message, [])
    sender.join()


def test_descriptors_arrive_with_their_message(pair):
    """The peer gets descriptors of the same files, in order, with the message they were sent beside."""
    files = [os.memfd_create(name) for name in "ab"]
    send_message(pair[0], {"id": 1}, files)
    send_message(pair[0], {"id": 2})
    message, received = receive_message(pair[1])

    assert message == {"id": 1}
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in files]
    assert receive_message(pair[1]) == ({"id": 2}, [])
    for fd in (*files, *received):
        os.close(fd)


def test_header_in_single_bytes(pair):
    """Where the stream is cut does not matter."""
    for byte in framed(b'{"id": 1}'):
        pair[0].send(bytes([byte]))
    assert receive_message(pair[1]) == ({"id": 1}, [])


@pytest.mark.parametrize("part", [b"", b"\0\0", framed(b'{"id": 1}')[:-1]])
def test_closed_peer(pair, part):
    """The end of the connection is told as such, between messages and within one."""
    pair[0].sendall(part)
    pair[0].close()
    with pytest.raises(PeerClosed, match="in the middle" if part else "closed the connection$"):
        receive_message(pair[1])


def test_reset_peer():
    """A peer that went away without reading is told as the end of the connection too."""
    for part in (b"", framed(b"{}")[:-1]):
        left, right = socket.socketpair()
        with left, right:
            left.sendall(part)
            right.sendall(b"unread")
            left.close()
            with pytest.raises(PeerClosed):
                receive_message(right)


def test_send_to_closed_peer(pair):
    """Sending to nobody raises PeerClosed."""
    pair[1].close()
    with pytest.raises(PeerClosed):
        send_message(pair[0], {"id": 1})


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b"[" * 100_000])
def test_malformed_body(pair, body):
    """What is not a JSON object in UTF-8 is refused, and descriptors beside it are not left open."""
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(pair[0], [framed(body)], [0])
    with pytest.raises(MalformedMessage):
        receive_message(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_length_over_the_limit(pair):
    """An absurd length is refused before anything is read or allocated."""
    pair[0].sendall(b"\xff\xff\xff\xff")
    with pytest.raises(MalformedMessage, match="4294967295 bytes"):
        receive_message(pair[1])


def test_lost_descriptors(pair, monkeypatch):
    """Descriptors that did not fit are an error, not a message with fewer."""
    monkeypatch.setattr(messages, "MAX_FDS", 1)
    socket.send_fds(pair[0], [framed(b"{}")], [0] * 9)
    with pytest.raises(MalformedMessage, match="file descriptors were lost"):
        receive_message(pair[1])


def test_refused_before_a_byte_is_sent(pair, monkeypatch):
    """What can not be sent leaves the connection as it was."""
    monkeypatch.setattr(messages, "LIMIT", 20)
    for message, fds in (({"id": object()}, []), ({"id": "x" * 20}, []), ({"id": 1}, [0] * (MAX_FDS + 1))):
        with pytest.raises((TypeError, ValueError)):
            send_message(pair[0], message, fds)
    send_message(pair[0], {"id": 1})
    assert receive_message(pair[1]) == ({"id": 1}, [])
