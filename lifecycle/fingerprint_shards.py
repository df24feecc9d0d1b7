"""Fingerprints of tensors that are stored in shards, as DTensor and FSDP do: boxes cut out of the whole.

A shard along the first dimension is one run of the whole's bytes. Along an inner one it is many short rows, which are
summed as a matrix: the factor of a word is a term of its row plus a term of its column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from lifecycle.fingerprint import MASK, WORD, chunk_bytes, partial

if TYPE_CHECKING:
    from torch import Tensor


def shard_partials(shard: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """What a rectangular shard adds to its tensor's fingerprint, as values for ``combined``.

    The whole has shape ``global_shape``; the shard's first element has index ``offsets`` there. The rows of a shard
    that is split along inner dimensions are summed together, a chunk at a time. Waits for the device. Raises ValueError
    for a shard that does not lie inside the whole.
    """
    shape, dims = tuple(shard.shape), shard.dim()
    fits = len(global_shape) == len(offsets) == dims and all(
        0 <= offset <= whole - size for whole, offset, size in zip(global_shape, offsets, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a shard of shape {shape} at {tuple(offsets)} does not lie inside a tensor of shape "
            f"{tuple(global_shape)}: give the whole's shape, and one offset per dimension"
        )
    steps = [shard.itemsize * prod(global_shape[dim + 1 :]) for dim in range(dims)]
    first = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    return list(_shard_sums(shard.detach(), steps, first)) if shard.numel() else []


def _shard_sums(shard: Tensor, steps: Sequence[int], first: int) -> Iterator[int]:
    """Sums of a shard with elements, the one at index i being at byte first + Σ i·steps of the whole."""
    import torch

    rows = _row_dims(shard, steps)
    limit = chunk_bytes(shard.device)
    if not rows:
        yield partial(shard, first)
    elif shard.nbytes <= limit:
        yield from _sums_of_rows(shard, steps[:rows], first)
    elif len(shard) == 1:
        yield from _shard_sums(shard[0], steps[1:], first)
    else:
        height = max(1, limit * len(shard) // shard.nbytes)
        for number, block in enumerate(torch.split(shard, height)):
            yield from _shard_sums(block, steps, first + number * height * steps[0])


def _row_dims(shard: Tensor, steps: Sequence[int]) -> int:
    """How many leading dimensions count rows; over the others the bytes follow each other in the whole."""
    dims, nbytes = shard.dim(), shard.itemsize
    while dims and (shard.shape[dims - 1] == 1 or steps[dims - 1] == nbytes):
        dims -= 1
        nbytes *= shard.shape[dims]
    return dims


def _sums_of_rows(shard: Tensor, steps: Sequence[int], first: int) -> Iterator[int]:
    """The sums of rows that begin at byte first + Σ i·steps: one for all that begin at the same byte of a word."""
    import torch

    whole = torch.zeros((), dtype=torch.int64, device=shard.device)
    begins, leads = whole + first, {first % WORD}
    for size, step in zip(shard.shape, steps, strict=False):
        begins = begins.unsqueeze(-1) + torch.arange(0, size * step, step, device=shard.device)
        leads = {(lead + number * step) % WORD for lead in leads for number in range(min(size, WORD))}
    begins = begins.reshape(-1)
    plain = shard.resolve_conj().resolve_neg().contiguous().as_strided((shard.numel(),), (1,))
    rows = plain.view(torch.uint8).view(len(begins), -1)
    for lead in leads:
        chosen = begins % WORD == lead
        some = (rows, begins) if len(leads) == 1 else (rows[chosen], begins[chosen])
        yield _sum_of_rows(*some, lead)


def _sum_of_rows(rows: Tensor, begins: Tensor, lead: int) -> int:
    """Σ w·(2i + 1) over rows of bytes that begin at byte ``lead`` of words of their own (see ``_digest``)."""
    import torch

    count, nbytes = rows.shape
    columns = -(-(lead + nbytes) // WORD)
    padded = rows.new_zeros(count, columns * WORD)
    padded[:, lead : lead + nbytes] = rows
    words = padded.view(torch.int64)
    by_row = words.sum(1) * (begins // WORD * 2)
    by_column = words.sum(0) * torch.arange(1, 2 * columns, 2, device=rows.device)
    return int(by_row.sum() + by_column.sum()) & MASK
