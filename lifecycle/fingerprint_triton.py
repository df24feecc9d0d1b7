"""The fingerprint's sum as one Triton launch over many tensors of a device.

A table on the device has one row per chunk of a tensor; one program sums one chunk and adds its value to the tensor's
total. Integer addition commutes, so the result does not depend on the order in which programs end.

The program reads ``BLOCK`` words at a time into as many lanes. Word number i = first + j·BLOCK + lane has the factor
2i + 1, so a chunk needs Σ w and Σ w·(j·BLOCK + lane). [Note: no products] Each lane keeps the running sum of its words
and the sum of these running sums: two additions per word. Over n blocks the latter is Σ w_j·(n - j), so Σ w_j·j is n
times the former less the latter, and products are left for the end of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from lifecycle.fingerprint import chunks_of

BLOCK = 2048  # words that a program reads at a time
WARPS = 4


@frozen(eq=False)
class Table:
    """The chunks of ``count`` tensors, as int64 of shape (chunks, 4) on their device: see ``chunks_of``."""

    chunks: Tensor
    count: int

    def sums(self, into: Tensor | None = None) -> Tensor:
        """Enqueue the sums on the device's current stream: int64 of shape (count,), mod 2⁶⁴. Does not wait.

        ``into``: what an earlier call returned, which nobody reads any more.
        """
        with torch.cuda.device(self.chunks.device):
            if into is None:
                totals = torch.zeros(self.count, dtype=torch.int64, device=self.chunks.device)
            else:
                into.record_stream(torch.cuda.current_stream())  # nor is this, if it is dropped before it was read
                totals = into.zero_()
            self.chunks.record_stream(torch.cuda.current_stream())  # not re-used before this launch has read it
            launch(self.chunks, totals)
        return totals


def table(tensors: Sequence[tuple[int, int, int]], device: torch.device) -> Table:
    """The table of tensors given as (address, bytes, number of the first word); addresses are multiples of 8.

    Waits for its copy to the device.
    """
    chunks = np.concatenate([chunks_of(*tensor, index) for index, tensor in enumerate(tensors)])
    return Table(torch.from_numpy(chunks).to(device), len(tensors))


def launch(chunks: Tensor, totals: Tensor) -> None:
    """Add the sums of the chunks to ``totals``, on the current device's current stream."""
    # No floating point here; unless told so, some releases of Triton warn that its default will change.
    _add_chunk[(len(chunks),)](chunks, totals, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False)


@triton.jit  # type: ignore[untyped-decorator]
def _add_chunk(chunks, totals, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = chunks + 4 * tl.program_id(0)
    address = tl.load(row)
    nbytes = tl.load(row + 1)
    first = tl.load(row + 2)
    index = tl.load(row + 3)
    count = (nbytes // 8).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    # Without the hint the compiler can not know that 16 bytes may be loaded at a time. It is not true of a chunk of one
    # word, which has no whole block: under a mask words are loaded one by one.
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16) + lane
    summed = tl.zeros((BLOCK,), dtype=tl.int64)
    running = tl.zeros((BLOCK,), dtype=tl.int64)
    blocks = count // BLOCK
    for _ in range(blocks):
        summed += tl.load(words)
        running += summed
        words += BLOCK
    rest = count - blocks * BLOCK
    summed += tl.load(words, mask=lane < rest, other=0)
    running += summed
    # [Note: no products], over blocks + 1 blocks.
    places = lane.to(tl.int64) * summed + ((blocks + 1) * summed - running) * BLOCK
    # The bytes after the last whole word, as one more word.
    byte = tl.arange(0, 8)
    tail = tl.load((address + 8 * count).to(tl.pointer_type(tl.uint8)) + byte, mask=byte < nbytes % 8, other=0)
    last = tl.sum(tail.to(tl.int64) << (8 * byte).to(tl.int64))
    total = tl.sum((2 * first + 1) * summed + 2 * places) + (2 * (first + count) + 1) * last
    tl.atomic_add(totals + index, total, sem="relaxed")


INTERPRETED = not isinstance(_add_chunk, triton.JITFunction)
