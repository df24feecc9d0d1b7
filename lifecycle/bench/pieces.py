"""How long a pool takes to go and come by the pieces it is made of: few large ones, or many small ones.

The memory saver maps piece by piece, and what it maps is cleared by the driver before bytes can come: in the resume or
behind it. So what counts is a pause, and a resume together with a copy right behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lifecycle.bench import peers, saver
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.result import Group, Result, bar
from lifecycle.bench.subject import Options, device_here
from lifecycle.bench.timing import Turn, idle, in_turns
from lifecycle.errors import MissingExtra

_MIB = 1 << 20
SIZES = (32, 64, 128, 256, 512, 1024, 2048)  # MiB; and all in one


class _Pool:
    """A pool of pieces of one size, and host memory for what they hold."""

    def __init__(self, tag: str, nbytes: int, piece: int, host: Tensor) -> None:
        self._tag, self._host = tag, host
        with saver.allocating(tag, backup=False) as self._saver:
            starts = range(0, nbytes, piece)
            self._pieces = [_filled(min(piece, nbytes - start)) for start in starts]
        idle()  # memory that a kernel still writes to must not go

    def sleep(self) -> None:
        self._saver.pause(self._tag)

    def wake(self) -> None:
        self._saver.resume(self._tag)

    def wake_and_copy(self) -> None:
        self.wake()
        start = 0
        for piece in self._pieces:
            piece.copy_(self._host[start : start + piece.numel()], non_blocking=True)
            start += piece.numel()


def _filled(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device_here()).fill_(1)


def measure(options: Options) -> Result:
    """Raises MissingExtra without CUDA or the memory saver."""
    if (why := saver.missing_saver()) is not None:
        raise MissingExtra(f"bench pieces ({why})", "torch-memory-saver", "cuda")
    nbytes, device = options.nbytes, device_here()
    host = peers.host_buffer(nbytes)
    host.fill_(1)
    link = peers.Link(nbytes, device, host)
    turns: dict[str, Turn] = {}
    for size in (*SIZES, nbytes // _MIB):
        pool = _Pool(f"bench-pieces-{size}", nbytes, min(size * _MIB, nbytes), host)
        pool.sleep()  # so that all of them fit beside each other
        turns[_name(size, nbytes)] = Turn({"wake": pool.wake_and_copy, "sleep": pool.sleep}, idle)
        turns[f"{_name(size, nbytes)}, bare"] = Turn({"wake": pool.wake, "sleep": pool.sleep})
    turns[peers.PLAIN] = Turn({"wake": link.into})
    found = in_turns(turns, options.rounds)
    names = [_name(size, nbytes) for size in (*SIZES, nbytes // _MIB)]
    copy = found[peers.PLAIN]["wake"].done
    pauses = [bar(name, "ours", found[name]["sleep"]) for name in names]
    bare = [bar(name, "ours", found[f"{name}, bare"]["wake"]) for name in names]
    wakes = [bar(name, "ours", found[name]["wake"]) for name in names]
    groups = (
        Group("a pause", "s", pauses),
        Group("a bare resume", "s", bare),
        Group("a resume and a copy behind it", "s", wakes, copy, peers.PLAIN),
    )
    figures = {
        name: {
            "pause": found[name]["sleep"].done,
            "bare_resume": found[f"{name}, bare"]["wake"].done,
            "resume_and_copy": found[name]["wake"].done,
        }
        for name in names
    }
    return Result("pieces", machine_facts(), options.to_plain(), groups, {"plain_copy": copy, "pieces": figures})


def _name(mib: int, nbytes: int) -> str:
    return "all in one" if mib * _MIB >= nbytes else f"pieces of {mib} MiB"
