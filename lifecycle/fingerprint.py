"""Fingerprints: the one number by which bytes of weights are compared, the same on every device.

A tensor's bytes in logical (row-major) order, zero-padded to little-endian 64-bit words w_0, w_1, …, give
Σ w_i·(2i+1) mod 2⁶⁴, written as 16 hexadecimal digits. The sum is linear in the bytes, so pieces of a tensor are
summed independently, wherever each lies, and the odd factors make the place of a word count.

[Note: limits of the fingerprint] It finds accidents, not adversaries: this is a sum, no cryptographic hash, and anyone
can construct other bytes with the same value. By chance two contents agree with probability 2⁻⁶⁴, but some structured
changes are seen less well, because 2ᵏ·(2i+1) mod 2⁶⁴ depends on the lowest 64-k bits of the factor only:

- bit 63 counts the same in every word, so flips of it in an even number of words cancel. It is the sign of every second
  float32 element (of every fourth bfloat16 one): flipping the signs of two such elements goes unnoticed;
- the bits just below it distinguish few places, and exchanging two words goes unnoticed when their difference times
  twice their distance is a multiple of 2⁶⁴.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import accumulate, chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_MASK = (1 << 64) - 1
_WORD = 8
_COLUMNS = 1024  # words per row of the folded matrix
# On a CPU a block stays below the 32768 elements from which torch hands a sum to its thread pool: one core already sums
# at the memory's speed, and waiting for the pool costs up to thirty times that when other processes use the cores.
_SERIAL_ROWS = 31
_CHUNK_BYTES = {"cpu": 8 << 20}
_DEVICE_CHUNK_BYTES = 1 << 30  # launches cost more than passes


def fingerprint(tensor: Tensor) -> str:
    """The fingerprint of a tensor's values: 16 hexadecimal digits.

    Any dtype, shape, stride and device; the value depends on the bytes in logical order alone, not on shape, dtype or
    layout (``part_fingerprint`` adds those). Temporaries of up to a chunk (8 MiB on a CPU, 1 GiB elsewhere) are made
    only where the bytes are strided or misaligned. Waits for the device. See [Note: limits of the fingerprint].
    """
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor, by name. Each device works through all of its tensors and is waited for once."""
    digests = [(name, *digest) for name, tensor in tensors.items() for digest in _digests(tensor)]
    totals = dict.fromkeys(tensors, 0)
    for (name, first, count, _), sums in zip(digests, _on_cpu([sums for *_, sums in digests]), strict=True):
        totals[name] += int(sums.dot(_factors(first, count)))
    return {name: _hex(total) for name, total in totals.items()}


def part_fingerprint(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The fingerprint of a part from its tensors' (name, dtype, shape, fingerprint), in the part's order.

    The same sum, over two words per tensor: the first 8 bytes of BLAKE2b of name, dtype and shape; its fingerprint.
    """
    words = chain.from_iterable((_identity(name, dtype, shape), int(f, 16)) for name, dtype, shape, f in entries)
    return _hex(sum(word * (2 * index + 1) for index, word in enumerate(words)))


def _identity(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    text = json.dumps([name, dtype, list(shape)], separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode()).digest()[:_WORD], "little")


def _hex(total: int) -> str:
    return f"{total & _MASK:016x}"


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """The tensor's elements in logical order, as one-dimensional contiguous tensors of at most ``limit`` bytes."""
    import torch

    if tensor.nbytes <= limit:
        # Not view(-1): a single element, or none, may keep a stride that no other dtype can be viewed through.
        yield tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
    elif tensor.is_contiguous():
        for piece in torch.split(tensor.view(-1), limit // tensor.itemsize):
            yield piece.resolve_conj().resolve_neg()
    else:
        rows = limit * len(tensor) // tensor.nbytes
        for block in torch.split(tensor, rows) if rows else tensor.unbind():
            yield from _pieces(block, limit)


def _words(piece: Tensor, lead: int) -> Tensor:
    """The piece as int64 words, its first byte being byte number ``lead`` (0 to 7) of the first word."""
    import torch

    raw = piece.view(torch.uint8)
    aligned = raw.data_ptr() % _WORD == 0 and raw.storage_offset() % _WORD == 0
    if lead == 0 and aligned and raw.numel() % _WORD == 0:
        return raw.view(torch.int64)
    padded = raw.new_zeros(-(-(lead + raw.numel()) // _WORD) * _WORD)
    padded[lead : lead + raw.numel()] = raw
    return padded.view(torch.int64)


def _digests(tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Per piece of the tensor: number of its first word, count of its words, and its digest (see ``_digest``)."""
    position = 0
    for piece in _pieces(tensor.detach(), _CHUNK_BYTES.get(tensor.device.type, _DEVICE_CHUNK_BYTES)):
        words = _words(piece, position % _WORD)
        yield position // _WORD, words.numel(), _digest(words)
        position += piece.nbytes


def _digest(words: Tensor) -> Tensor:
    """What is left to be weighted: the sums of rows and columns of the words folded into a matrix, and the rest.

    Folded into rows of C = ``_COLUMNS`` words, the sum needs no product per word: the factor 2·(first + r·C + c) + 1 of
    words[r, c] is a term of the row plus a term of the column, so two plain sums, which run at memory speed as int64
    products do not, leave a thousandth of the words for ``_factors``. int64 wraps around like the value mod 2⁶⁴.
    """
    import torch

    rows = words.numel() // _COLUMNS
    if not rows:
        return words
    height = _SERIAL_ROWS if words.device.type == "cpu" else rows
    blocks = torch.split(words[: rows * _COLUMNS].view(rows, _COLUMNS), height)
    by_column = reduce(torch.add, (block.sum(0) for block in blocks))
    return torch.cat([*(block.sum(1) for block in blocks), by_column, words[rows * _COLUMNS :]])


def _factors(first: int, count: int) -> NDArray[np.int64]:
    """The factor of each entry of the digest of ``count`` words whose first is number ``first``."""
    import numpy as np

    rows = count // _COLUMNS
    rest = np.arange(2 * (first + rows * _COLUMNS) + 1, 2 * (first + count) + 1, 2, dtype=np.int64)
    if not rows:
        return rest
    by_row = np.arange(2 * first, 2 * (first + rows * _COLUMNS), 2 * _COLUMNS, dtype=np.int64)
    by_column = np.arange(1, 2 * _COLUMNS, 2, dtype=np.int64)
    return np.concatenate([by_row, by_column, rest])


def _on_cpu(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """The one-dimensional int64 tensors as arrays, in order: one transfer per device."""
    import numpy as np
    import torch

    moved: dict[int, NDArray[np.int64]] = {}
    for device in {tensor.device for tensor in tensors}:
        there = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        together = torch.cat([tensors[index] for index in there]).cpu().numpy()
        ends = list(accumulate(tensors[index].numel() for index in there))
        moved.update(zip(there, np.split(together, ends[:-1]), strict=True))
    return [moved[index] for index in range(len(tensors))]
