"""How long a pool takes to go and come by the pieces it is made of: few large ones, or many small ones.

The memory saver unmaps and maps piece by piece, so a pause and a resume take longer the more there are. NVIDIA's driver
clears what a pause has given back, in the background and with the device's copy engines (see ``in_turns``), which a
copy right behind a pause may have to share. So it is measured there and after a rest, with the resume ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from lifecycle.bench import peers, saver
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.result import Group, Result, bar
from lifecycle.bench.subject import Options, device_here
from lifecycle.bench.timing import Times, Turn, idle, in_turns
from lifecycle.errors import LifecycleError

_MIB = 1 << 20
SIZES = (32, 64, 128, 256, 512, 1024, 2048)  # MiB; and all in one
PAUSE, RESUME = "bare pause", "bare resume"
BEHIND, RESTED = "resume and copy right behind a pause", "resume and copy after a rest"

Found = Mapping[str, Mapping[str, Times]]


@frozen(eq=False)
class _Pool:
    """A pool of pieces of one size, paused but for when it is measured, so that any number fit beside each other.

    ``host``: uint8, as long as all pieces, page-locked. The device must be idle whenever one of these is called.
    """

    tag: str
    saver: Any
    pieces: tuple[Tensor, ...]
    host: Tensor

    def pause(self) -> None:
        self.saver.pause(self.tag)

    def resume(self) -> None:
        self.saver.resume(self.tag)

    def resume_and_copy(self) -> None:
        self.resume()
        start = 0
        for piece in self.pieces:
            piece.copy_(self.host[start : start + piece.numel()], non_blocking=True)
            start += piece.numel()

    def turn(self) -> Turn:
        """From paused to paused. Of all steps one is not rested before: the copy right behind the pause."""
        steps = {RESUME: self.resume, PAUSE: self.pause, BEHIND: self.resume_and_copy, RESTED: self.resume_and_copy}
        return Turn(steps, each=self._pause_again, at_once=(BEHIND,))

    def _pause_again(self, step: str) -> None:
        if step in (BEHIND, RESTED):
            self.pause()


def _paused_pool(tag: str, sizes: tuple[int, ...], host: Tensor) -> _Pool:
    with saver.allocating(tag, backup=False) as saver_here:
        # torch takes a segment of its own for each that has 10 MiB or more
        pieces = tuple(torch.empty(nbytes, dtype=torch.uint8, device=device_here()) for nbytes in sizes)
    pool = _Pool(tag, saver_here, pieces, host)
    idle()
    pool.pause()
    return pool


def _split(nbytes: int) -> dict[str, tuple[int, ...]]:
    """By name, the bytes of each piece: of all sizes that are smaller than the whole, and the whole."""
    sizes = {f"pieces of {size} MiB": size * _MIB for size in SIZES if size * _MIB < nbytes} | {"all in one": nbytes}
    return {name: tuple(min(size, nbytes - start) for start in range(0, nbytes, size)) for name, size in sizes.items()}


def measure(options: Options) -> Result:
    """Needs the bytes in host memory and twice on the device. Raises LifecycleError without CUDA or memory saver."""
    if (why := saver.missing_saver()) is not None:
        raise LifecycleError(f"bench pieces measures the memory saver on a CUDA device, and there is none: {why}")
    nbytes = options.nbytes
    host = peers.host_buffer(nbytes)
    link = peers.Link(nbytes, device_here(), host)
    link.out()  # something that is not zero
    split = _split(nbytes)
    turns = {name: _paused_pool(f"bench-pieces-{sizes[0]}", sizes, host).turn() for name, sizes in split.items()}
    found = in_turns({**turns, peers.PLAIN: Turn({"in": link.into})}, options.rounds, options.rest)
    return _result(options, split, found)


def _result(options: Options, split: Mapping[str, tuple[int, ...]], found: Found) -> Result:
    copy = found[peers.PLAIN]["in"].done
    groups = [Group(step, "s", [bar(name, "ours", found[name][step]) for name in split]) for step in (PAUSE, RESUME)]
    for step in (BEHIND, RESTED):
        bars = [bar(name, "ours", found[name][step]) for name in split]
        groups.append(Group(step, "s", bars, copy, peers.PLAIN))
    figures = {
        "nbytes": options.nbytes,
        "plain_copy": copy,
        "pieces": {
            name: {
                "count": len(sizes),
                "piece_bytes": sizes[0],
                "bare_pause": found[name][PAUSE].done,
                "bare_resume": found[name][RESUME].done,
                "resume_and_copy_behind_a_pause": found[name][BEHIND].done,
                "resume_and_copy_after_a_rest": found[name][RESTED].done,
            }
            for name, sizes in split.items()
        },
    }
    settings = {"gib": options.gib, "rounds": options.rounds, "rest": options.rest}
    return Result("pieces", machine_facts(), settings, tuple(groups), figures)
