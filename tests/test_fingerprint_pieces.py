"""Fingerprints of tensors that are stored in pieces: byte ranges, and shards along any dimension."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from fingerprint_help import DTYPES, from_bytes, logical_bytes, random_bytes, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import fingerprint as module
from lifecycle.fingerprint import combined, fingerprint, partial, prepare
from lifecycle.fingerprint_shards import shard_partials


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.data())
def test_pieces_at_any_byte_add_up(content: bytes, data: st.DataObject):
    """Wherever the bytes are cut, also inside words, and in whatever order the pieces come."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    edges = [0, *cuts, len(content)]
    raw = torch.tensor(list(content), dtype=torch.uint8)
    pieces = [(raw[start:end], start) for start, end in pairwise(edges)]

    values = [partial(piece.clone(), start) for piece, start in data.draw(st.permutations(pieces))]

    assert combined(values) == reference(content)
    assert all(0 <= value < 2**64 for value in values)


def test_large_pieces_add_up():
    """Pieces longer than a folded row and a chunk, at odd offsets, each in memory of its own."""
    whole = random_bytes((8 << 20) + 4_099)
    edges = [0, 8193, 12_345, (8 << 20) - 1, len(whole)]
    pieces = [(whole[start:end].clone(), start) for start, end in pairwise(edges)]

    assert combined(partial(*piece) for piece in pieces) == fingerprint(whole)


def test_pieces_are_prepared_together():
    """One Prepared holds pieces and whole tensors; pieces far into a large tensor count from there."""
    whole = random_bytes(4096)
    pieces = {"low": whole[:1111].clone(), "high": whole[1111:].clone(), "whole": whole}
    far = 5 << 30

    found = prepare(pieces, {"high": 1111}).start().partials()
    shifted = partial(whole, far)

    assert combined([found["low"], found["high"]]) == combined([found["whole"]]) == fingerprint(whole)
    words = whole.view(torch.int64).tolist()
    assert shifted == sum(word * (2 * (far // 8 + i) + 1) for i, word in enumerate(words)) % 2**64


@st.composite
def sharded(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]]]:
    """A tensor, and where it is cut along each dimension."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = from_bytes(draw(st.binary(min_size=count, max_size=count)), dtype).view(shape)
    cuts = [sorted(draw(st.lists(st.integers(0, size), max_size=2))) for size in shape]
    return tensor, [[0, *cut, size] for cut, size in zip(cuts, shape, strict=True)]


@pytest.mark.parametrize("limit", [16, 40, 4096])
@settings(deadline=None, max_examples=150)
@given(sharded(), st.booleans())
def test_shards_along_every_dimension_add_up(limit: int, case: tuple[torch.Tensor, list[list[int]]], own: bool):
    """Boxes that fill a tensor have its fingerprint together, in memory of their own or as views, in any chunks."""
    tensor, edges = case
    values: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", {"cpu": limit})
        for box in product(*(pairwise(edge) for edge in edges)):
            shard = tensor[tuple(slice(start, end) for start, end in box)]
            values += shard_partials(shard.clone() if own else shard, tensor.shape, [start for start, _ in box])

    assert combined(values) == reference(logical_bytes(tensor))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_even_shards_of_a_weight(dim: int, dtype: torch.dtype):
    """What FSDP and tensor parallelism store: equal shards along one dimension."""
    whole = random_bytes(96 * 33 * 12 * dtype.itemsize).view(dtype).view(96, 33, 12)
    shards = whole.chunk(3, dim)
    size = shards[0].shape[dim]

    values = [
        shard_partials(s.clone(), whole.shape, [n * size * (d == dim) for d in range(3)]) for n, s in enumerate(shards)
    ]

    assert combined(value for some in values for value in some) == fingerprint(whole)


def test_shards_of_lazy_and_strided_tensors():
    """A shard is read by value: lazily conjugated, transposed, or both."""
    whole = torch.view_as_complex(torch.randn(6, 5, 2)).conj().t()
    left, right = whole[:, :2], whole[:, 2:]

    values = shard_partials(left, whole.shape, (0, 0)) + shard_partials(right, whole.shape, (0, 2))

    assert combined(values) == reference(logical_bytes(whole))


@pytest.mark.parametrize("offsets", [(0, 3), (-1, 0), (0,), (0, 0, 0)])
def test_a_shard_outside_its_tensor_is_refused(offsets: tuple[int, ...]):
    """Offsets that do not fit are refused, with both shapes."""
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(4, 4\)"):
        shard_partials(torch.zeros(2, 2), (4, 4), offsets)
