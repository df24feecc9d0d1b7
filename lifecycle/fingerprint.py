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
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    return _hex(int(_total(tensor).item()))


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor, by name. A device works on all of them before the first is waited for."""
    totals = {name: _total(tensor) for name, tensor in tensors.items()}
    return {name: _hex(int(total.item())) for name, total in totals.items()}


def part_fingerprint(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The fingerprint of a part from its tensors' (name, dtype, shape, fingerprint), in the part's order.

    The same sum, over two words per tensor: the first 8 bytes of BLAKE2b of name, dtype and shape; its fingerprint.
    """
    words = chain.from_iterable((_identity(name, dtype, shape), int(f, 16)) for name, dtype, shape, f in entries)
    return _hex(sum(word * (2 * index + 1) for index, word in enumerate(words)))


def _total(tensor: Tensor) -> Tensor:
    """The sum as a 0-dim int64 on the tensor's device, which wraps around like the mathematical value mod 2⁶⁴."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    position = 0
    for piece in _pieces(tensor.detach(), _CHUNK_BYTES.get(tensor.device.type, _DEVICE_CHUNK_BYTES)):
        for term in _terms(_words(piece, position % _WORD), position // _WORD):
            total += term
        position += piece.nbytes
    return total


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


def _terms(words: Tensor, first: int) -> Iterator[Tensor]:
    """Terms of Σ words[j]·(2·(first+j)+1).

    Folded into rows of C = ``_COLUMNS`` words, the sum needs no product per word: the factor 2·(first + r·C + c) + 1 of
    words[r, c] is a term of the row plus a term of the column, so two plain sums, which run at memory speed as int64
    products do not, and two short products give it.
    """
    rows = words.numel() // _COLUMNS
    rest = words[rows * _COLUMNS :]
    if rest.numel():
        yield (rest * _arithmetic(2 * (first + rows * _COLUMNS) + 1, 2, rest)).sum()
    if rows:
        by_row, by_column = _sums(words[: rows * _COLUMNS].view(rows, _COLUMNS))
        yield (by_column * _arithmetic(1, 2, by_column)).sum()
        yield (by_row * _arithmetic(2 * first, 2 * _COLUMNS, by_row)).sum()


def _sums(folded: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of each row and of each column of an int64 matrix with ``_COLUMNS`` columns."""
    import torch

    blocks = torch.split(folded, _SERIAL_ROWS if folded.device.type == "cpu" else len(folded))
    return torch.cat([block.sum(1) for block in blocks]), reduce(torch.add, (block.sum(0) for block in blocks))


def _arithmetic(start: int, step: int, like: Tensor) -> Tensor:
    """start, start+step, … as int64, as many and on the same device as ``like``."""
    import torch

    return torch.arange(start, start + step * like.numel(), step, dtype=torch.int64, device=like.device)
