"""Fingerprints: the one number by which bytes of weights are compared, the same on every device.

A tensor's bytes in logical (row-major) order, zero-padded to little-endian 64-bit words w_0, w_1, …, give
Σ w_i·(2i+1) mod 2⁶⁴, written as 16 hexadecimal digits. The sum is linear in the bytes, so pieces of a tensor are
summed independently, wherever each lies, and the odd factors make the place of a word count.

On CUDA one Triton launch per device sums every tensor whose bytes lie in order (``fingerprint_triton``). Where Triton
is missing, and for what is strided or misaligned, torch's own sums do it in two passes.

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
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from lifecycle.fingerprint_triton import Table

MASK = (1 << 64) - 1
WORD = 8
_COLUMNS = 1024  # words per row of the folded matrix
# On a CPU a block stays below the 32768 elements from which torch hands a sum to its thread pool: one core already sums
# at the memory's speed, and waiting for the pool costs up to thirty times that when other processes use the cores.
_SERIAL_ROWS = 31
_CHUNK_BYTES = {"cpu": 8 << 20}
_DEVICE_CHUNK_BYTES = 1 << 30  # launches cost more than passes
KERNEL_CHUNK_BYTES = 512 << 10  # that one program of the kernel sums: many more chunks than run at once
_VECTOR = 16  # bytes of the kernel's loads; its chunks have a multiple of it


def fingerprint(tensor: Tensor) -> str:
    """The fingerprint of a tensor's values: 16 hexadecimal digits.

    Any dtype, shape, stride and device; the value depends on the bytes in logical order alone, not on shape, dtype or
    layout (``part_fingerprint`` adds those). Temporaries of up to a chunk (8 MiB on a CPU, 1 GiB elsewhere) are made
    only where the bytes are strided or misaligned. Waits for the device. See [Note: limits of the fingerprint].
    """
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The fingerprint of each tensor, by name. Each device works through all of its tensors and is waited for once."""
    return prepare(tensors).start().read()


def part_fingerprint(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The fingerprint of a part from its tensors' (name, dtype, shape, fingerprint), in the part's order.

    The same sum, over two words per tensor: the first 8 bytes of BLAKE2b of name, dtype and shape; its fingerprint.
    """
    words = chain.from_iterable((_identity(name, dtype, shape), int(f, 16)) for name, dtype, shape, f in entries)
    return _hex(sum(word * (2 * index + 1) for index, word in enumerate(words)))


def partial(tensor: Tensor, first_byte: int) -> int:
    """What a piece adds to a tensor's fingerprint whose bytes begin at ``first_byte`` of the whole, in logical order.

    Any offset of 0 or more, also inside a word. ``combined`` makes the fingerprint of all pieces' values.
    """
    return prepare({"": tensor}, {"": first_byte}).start().partials()[""]


def combined(partials: Iterable[int]) -> str:
    """The fingerprint of a tensor from the values of all of its pieces, in any order."""
    return _hex(sum(partials))


def prepare(
    tensors: Mapping[str, Tensor], first_bytes: Mapping[str, int] | None = None, *, kernel: bool = True
) -> Prepared:
    """Compute once what later fingerprints of these very tensors need, at the addresses that they have now.

    Reads none of their bytes. On CUDA this copies a table to each device, and the first call in a process compiles the
    kernel (a second or more, unless Triton finds it in its cache). ``first_bytes``: the tensors named are pieces that
    begin at this byte of their whole (see ``partial``). ``kernel=False``: by torch's own sums alone, to compare.
    """
    held, firsts = dict(tensors), first_bytes or {}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in held.items():
        by_device.setdefault(tensor.device, {})[name] = tensor
    works = tuple(_work(device, there, firsts, kernel) for device, there in by_device.items())
    return Prepared(held, tuple(tensor.data_ptr() for tensor in held.values()), works)


@frozen(eq=False)
class Prepared:
    """Tensors made ready for fingerprints, by name. Holds the tensor objects themselves, and so their memory.

    Their contents may change as they like. Each is expected at the address that it had.
    """

    tensors: Mapping[str, Tensor]
    _addresses: tuple[int, ...] = field(repr=False)
    _works: tuple[_Work, ...] = field(repr=False)

    def start(self) -> Started:
        """Enqueue the sums on each CUDA device's current stream, and the copy of the results to pinned host memory.

        Does not wait there, so the memory has to stay mapped until the result was read; on other devices the sums are
        done on return. May be called again before the last one was read. Raises ValueError naming the tensors that are
        no longer where they were. Memory that is unmapped at its address, as in a paused pool, can not be told.
        """
        moved = [
            name
            for (name, tensor), address in zip(self.tensors.items(), self._addresses, strict=True)
            if tensor.data_ptr() != address
        ]
        if moved:
            raise ValueError(
                f"fingerprints of {', '.join(moved)} were asked for, but this memory moved or was released since "
                "prepare(): call prepare() with these tensors again"
            )
        return Started(tuple(self.tensors), tuple(work.start() for work in self._works))


@frozen(eq=False)
class Started:
    """Fingerprints on their way. Reading waits for these results alone, and may be done again."""

    names: tuple[str, ...]
    _results: tuple[_Result, ...] = field(repr=False)

    def read(self) -> dict[str, str]:
        """Name to fingerprint. Raises RuntimeError where the device reports a failure."""
        return {name: _hex(total) for name, total in self.partials().items()}

    def partials(self) -> dict[str, int]:
        """Name to sum mod 2⁶⁴, as ``partial`` gives it. Raises RuntimeError where the device reports a failure."""
        totals = dict.fromkeys(self.names, 0)
        for result in self._results:
            totals |= result.totals()
        return totals


@frozen(eq=False)
class _Work:
    """What one device has to sum: the tensors of the kernel's table, and those that torch sums (with first bytes)."""

    device: torch.device
    table: Table | None
    in_table: tuple[str, ...]
    others: tuple[tuple[str, Tensor, int], ...]
    # Memory for results, on the host and on the device: taking some new can wait for what the device does.
    spare: list[Tensor] = field(factory=list)
    spare_totals: list[Tensor] = field(factory=list)

    def start(self) -> _Result:
        digests = [(name, *digest) for name, tensor, first in self.others for digest in _digests(tensor, first)]
        sums = [digest for *_, digest in digests]
        used: list[tuple[list[Tensor], Tensor]] = []
        if self.table is not None:
            sums.insert(0, self.table.sums(self.spare_totals.pop() if self.spare_totals else None))
            used.append((self.spare_totals, sums[0]))
        shares = tuple((name, first, count, digest.numel()) for name, first, count, digest in digests)
        host, wait = _fetch(self.device, sums, self.spare)
        if wait is not None:
            used.append((self.spare, host))
        return _Result(self.in_table, shares, host, wait, used)


@define(eq=False)
class _Result:
    """One device's sums in host memory, there once ``wait`` returns: one per name in the table, then the digests.

    A share is (name, number of its first word, count of its words, entries of its digest). ``used``: where to put the
    memory back, and which, once it has been read.
    """

    in_table: tuple[str, ...]
    shares: tuple[tuple[str, int, int, int], ...]
    host: Tensor
    wait: Callable[[], None] | None
    used: list[tuple[list[Tensor], Tensor]]
    _read: dict[str, int] | None = None
    _lock: threading.Lock = field(factory=threading.Lock)

    def totals(self) -> dict[str, int]:
        with self._lock:  # two forwards may wait for one block
            if self._read is None:
                if self.wait is not None:
                    self.wait()
                self._read = self._totals()
                for spare, memory in self.used:
                    spare.append(memory)
            return self._read

    def _totals(self) -> dict[str, int]:
        found = self.host.numpy()
        position = len(self.in_table)
        totals = dict(zip(self.in_table, found[:position].tolist(), strict=True))
        for name, first, count, length in self.shares:
            share = int(found[position : position + length].dot(_factors(first, count)))
            totals[name] = totals.get(name, 0) + share
            position += length
        return {name: total & MASK for name, total in totals.items()}


def _work(device: torch.device, tensors: Mapping[str, Tensor], firsts: Mapping[str, int], kernel: bool) -> _Work:
    placed = {name: (tensor, firsts.get(name, 0)) for name, tensor in tensors.items()}
    usable = kernel and device.type == "cuda" and kernel_problem(device) is None
    in_table = {name: place for name, place in placed.items() if usable and _in_order(*place)}
    others = tuple((name, *place) for name, place in placed.items() if name not in in_table)
    if not in_table:
        return _Work(device, None, (), others)
    from lifecycle.fingerprint_triton import table

    spans = [(tensor.data_ptr(), tensor.nbytes, first // WORD) for tensor, first in in_table.values()]
    return _Work(device, table(spans, device), tuple(in_table), others)


def _in_order(tensor: Tensor, first_byte: int) -> bool:
    """Whether the memory from the tensor's address on holds its words as they are to be summed."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and tensor.data_ptr() % WORD == 0 and first_byte % WORD == 0


@cache
def kernel_problem(device: torch.device) -> str | None:
    """Why the Triton kernel is not used on this CUDA device, or None where it is. Compiles it the first time.

    Warns where Triton is there but can not run the kernel (to build it takes a C compiler): fingerprints then cost
    about twice as much.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Triton has to say about itself is no failure
            _try_kernel(device)
    except ImportError as error:
        return f"Triton can not be imported: {error}"
    except Exception as error:
        problem = f"Triton could not run the kernel: {type(error).__name__}: {error}"
        warnings.warn(f"fingerprints on {device} take two passes over the bytes. {problem}", stacklevel=2)
        return problem
    return None


def _try_kernel(device: torch.device) -> None:
    from lifecycle import fingerprint_triton

    if fingerprint_triton.INTERPRETED:  # it would read the device's addresses on the CPU
        raise RuntimeError("TRITON_INTERPRET is set, so that kernels run on the CPU")
    fingerprint_triton.table([(0, 0, 0)], device).sums()


def chunks_of(address: int, nbytes: int, first_word: int, index: int) -> NDArray[np.int64]:
    """The kernel's table of a tensor: per chunk, at least one, its address, bytes, number of its first word, ``index``.

    An address that only is a multiple of 8 costs a first chunk of one word, so that the others can be read 16 bytes at
    a time. int64 of shape (chunks, 4).
    """
    import numpy as np

    lead = min(-address % _VECTOR, nbytes)
    starts = np.arange(lead, nbytes, KERNEL_CHUNK_BYTES, dtype=np.int64)
    if lead or not len(starts):
        starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    sizes = np.diff(starts, append=nbytes)
    return np.stack([address + starts, sizes, first_word + starts // WORD, np.full_like(starts, index)], axis=1)


def _fetch(
    device: torch.device, sums: Sequence[Tensor], spare: list[Tensor]
) -> tuple[Tensor, Callable[[], None] | None]:
    """The one-dimensional int64 tensors as one in host memory, and how to wait for it; None: it is there."""
    import torch

    if not sums:
        return torch.empty(0, dtype=torch.int64, device="cpu"), None
    if device.type != "cuda":
        return torch.cat(list(sums)).cpu(), None  # a copy: a short tensor's digest is a view of it
    with torch.cuda.device(device):
        together = sums[0] if len(sums) == 1 else torch.cat(list(sums))
        host = spare.pop() if spare else torch.empty(together.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(together, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
    return host, done.synchronize


def _identity(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    text = json.dumps([name, dtype, list(shape)], separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode()).digest()[:WORD], "little")


def _hex(total: int) -> str:
    return f"{total & MASK:016x}"


def chunk_bytes(device: torch.device) -> int:
    """The most bytes that are summed, and copied where they must be, in one go."""
    return _CHUNK_BYTES.get(device.type, _DEVICE_CHUNK_BYTES)


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
    aligned = raw.data_ptr() % WORD == 0 and raw.storage_offset() % WORD == 0
    if lead == 0 and aligned and raw.numel() % WORD == 0:
        return raw.view(torch.int64)
    padded = raw.new_zeros(-(-(lead + raw.numel()) // WORD) * WORD)
    padded[lead : lead + raw.numel()] = raw
    return padded.view(torch.int64)


def _digests(tensor: Tensor, first_byte: int) -> Iterator[tuple[int, int, Tensor]]:
    """Per piece of the tensor: number of its first word, count of its words, and its digest (see ``_digest``)."""
    position = first_byte
    for piece in _pieces(tensor.detach(), chunk_bytes(tensor.device)):
        words = _words(piece, position % WORD)
        yield position // WORD, words.numel(), _digest(words)
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
