"""Fingerprints: against plain integer arithmetic, over dtypes, strides, lengths and pieces."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from hashlib import blake2b

import pytest
import torch
from fingerprint_help import DTYPES, from_bytes, logical_bytes, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import fingerprint as module
from lifecycle.fingerprint import fingerprint, fingerprints, part_fingerprint


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bytes in any dtype, seen through a few views."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = 1
    for size in shape:
        count *= size
    before = draw(st.integers(0, 3))
    data = draw(st.binary(min_size=(before + count) * dtype.itemsize, max_size=(before + count) * dtype.itemsize))
    tensor = from_bytes(data, dtype)[before:].view(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        dim = draw(st.integers(0, len(shape) - 1))
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@settings(deadline=None, max_examples=300)
@given(tensors())
def test_equals_integer_arithmetic(tensor: torch.Tensor):
    """Any dtype, shape and stride: the value is the sum over the bytes in logical order."""
    assert fingerprint(tensor) == reference(logical_bytes(tensor))


@pytest.mark.parametrize("limit", [16, 40, 4096])
@settings(deadline=None, max_examples=100)
@given(tensors())
def test_pieces_do_not_matter(limit: int, tensor: torch.Tensor):
    """However small the pieces a tensor is read in, the value is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", {"cpu": limit})
        assert fingerprint(tensor) == reference(logical_bytes(tensor))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192 + 5, 31 * 8192, (8 << 20) + 8200 + 3])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_lengths_around_words_rows_and_chunks(length: int, offset: int):
    """Odd lengths, and starts that are not aligned to a word, are padded, not dropped."""
    raw = torch.randint(0, 256, (offset + length,), dtype=torch.uint8)[offset:]

    assert fingerprint(raw) == reference(raw.numpy().tobytes())


def test_large_strided_tensors():
    """A transposed tensor of several chunks has the fingerprint of its contiguous copy."""
    tensor = torch.randn(1030, 1531).to(torch.bfloat16).t()
    wide = torch.randn(3, 2_000_001, dtype=torch.float32)[:, ::2]

    assert fingerprint(tensor) == fingerprint(tensor.contiguous()) == reference(logical_bytes(tensor))
    assert fingerprint(wide) == reference(logical_bytes(wide))


def test_special_tensors():
    """Scalars, empty tensors, parameters, inference tensors and lazy conjugates are read by value."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    with torch.inference_mode():
        made_in_inference = torch.arange(5)

    assert fingerprints({"a": values, "b": torch.ones(2)}) == {
        "a": fingerprint(values),
        "b": fingerprint(torch.ones(2)),
    }
    assert fingerprint(torch.tensor(1.5)) == reference(logical_bytes(torch.tensor(1.5)))
    assert fingerprint(torch.empty(3, 0)) == "0" * 16
    assert fingerprint(torch.nn.Parameter(torch.ones(3))) == fingerprint(torch.ones(3))
    assert fingerprint(made_in_inference) == fingerprint(torch.arange(5))
    assert fingerprint(values.conj()) == fingerprint(torch.tensor([1 - 2j, 3 + 4j]))
    assert fingerprint(values.conj().imag) == fingerprint(torch.tensor([-2.0, 4.0]))
    with torch.inference_mode():
        assert fingerprint(torch.ones(3)) == fingerprint(torch.full((3,), 1.0))


def test_not_a_number_is_compared_by_its_bits():
    """Two NaNs of different bits are different, the same NaN is the same, 0.0 is not -0.0."""
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))

    assert fingerprint(quiet) == fingerprint(quiet.clone())
    assert fingerprint(quiet) != fingerprint(other)
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=400), st.data())
def test_every_single_flip_is_seen(content: bytes, data: st.DataObject):
    """Any one bit that changes, and any two different words that change places nearby, change the value."""
    raw = torch.tensor(list(content), dtype=torch.uint8)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = raw.clone()
    flipped[bit // 8] ^= 1 << bit % 8

    assert fingerprint(flipped) != fingerprint(raw)


def test_exchanged_words_are_seen():
    """The place of a word counts: the same values in another order are another content."""
    values = torch.arange(1000, dtype=torch.int64)

    assert fingerprint(values) != fingerprint(values.flip(0))


def test_known_limit_pairs_of_bit_63_cancel():
    """What the sum can not see, and says so: bit 63 flipped in two words, e.g. two float32 signs at odd places."""
    weights = torch.randn(64)
    flipped = weights.clone()
    flipped[[1, 33]] *= -1
    one_of_them = weights.clone()
    one_of_them[1] *= -1
    at_even_places = weights.clone()
    at_even_places[[0, 32]] *= -1

    assert not torch.equal(flipped, weights)
    assert fingerprint(flipped) == fingerprint(weights)
    assert fingerprint(one_of_them) != fingerprint(weights)
    assert fingerprint(at_even_places) != fingerprint(weights)


ENTRIES = [("a.weight", "float32", (2, 3), "00000000000000ff"), ("b", "bfloat16", (), "ffffffffffffffff")]


def test_part_fingerprint_is_the_same_sum():
    """A part's value is the sum over (hash of name, dtype, shape; fingerprint) of its tensors, in order."""
    words = b""
    for name, dtype, shape, value in ENTRIES:
        words += blake2b(json.dumps([name, dtype, list(shape)], separators=(",", ":")).encode()).digest()[:8]
        words += int(value, 16).to_bytes(8, "little")

    assert part_fingerprint(ENTRIES) == reference(words)
    assert part_fingerprint([]) == "0" * 16


@pytest.mark.parametrize(
    "changed",
    [
        [ENTRIES[1], ENTRIES[0]],
        [ENTRIES[0]],
        [("c", *ENTRIES[0][1:]), ENTRIES[1]],
        [("a.weight", "int32", (2, 3), "00000000000000ff"), ENTRIES[1]],
        [("a.weight", "float32", (3, 2), "00000000000000ff"), ENTRIES[1]],
        [("a.weight", "float32", (2, 3), "00000000000000fe"), ENTRIES[1]],
    ],
)
def test_part_fingerprint_sees_what_differs(changed: list[tuple[str, str, tuple[int, ...], str]]):
    """Order, names, dtypes, shapes and values all count."""
    assert part_fingerprint(changed) != part_fingerprint(ENTRIES)


def test_two_readers_put_memory_back_once():
    """Two forwards may wait for one block: what held its results is free for one later start, not for two."""
    spare: list[torch.Tensor] = []
    waiting = threading.Barrier(2, timeout=0.2)

    def wait() -> None:
        with suppress(threading.BrokenBarrierError):
            waiting.wait()

    host = torch.zeros(1, dtype=torch.int64)
    result = module._Result(("a",), (), host, wait, [(spare, host)])
    readers = [threading.Thread(target=result.totals) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()

    assert len(spare) == 1
    assert result.totals() == {"a": 0}
