"""Fingerprints prepared once and started many times."""

from __future__ import annotations

import pytest
import torch
from fingerprint_help import DTYPES, logical_bytes, random_bytes, reference

from lifecycle.bench.fingerprint import measure
from lifecycle.bench.shapes import llama_shapes
from lifecycle.fingerprint import fingerprints, prepare


def some_tensors() -> dict[str, torch.Tensor]:
    """One of every dtype, and a few odd ones."""
    raw = random_bytes(20_016)
    plain = {str(dtype): (raw % 2).bool() if dtype is torch.bool else raw.view(dtype) for dtype in DTYPES}
    odd = {"empty": raw[:0], "byte": raw[5:6], "misaligned": raw[3:9001], "strided": raw.view(torch.int16)[::3]}
    return {**plain, **odd, "transposed": raw[:20_000].view(torch.float32).view(50, 100).t()}


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: reference(logical_bytes(tensor)) for name, tensor in tensors.items()}


def test_every_start_sees_the_contents_of_its_time():
    """A Prepared is used again after contents changed; results that are read late are those of their start."""
    tensors = some_tensors()
    prepared = prepare(tensors)
    before, first = expected(tensors), prepared.start()
    tensors["torch.uint8"] += 1  # the storage of most of them
    after, second = expected(tensors), prepared.start()

    assert before["torch.bfloat16"] != after["torch.bfloat16"]
    assert second.read() == after
    assert first.read() == before
    assert first.read() == before


@pytest.mark.parametrize("count", [1, 7, 8, 1000])
def test_a_short_tensor_is_read_at_its_start(count: int):
    """Even a tensor alone, short enough to be weighted as it is, may change before its result is read."""
    tensor = random_bytes(8 * count)
    before, started = reference(logical_bytes(tensor)), prepare({"t": tensor}).start()
    tensor.zero_()

    assert started.read() == {"t": before}


def test_no_tensors():
    """Nothing has no fingerprints."""
    assert prepare({}).start().read() == {}


def test_the_tensors_are_held_as_they_are():
    """The objects that were given are kept, and no others over their storage."""
    tensors = some_tensors()

    assert all(held is tensors[name] for name, held in prepare(tensors).tensors.items())


@pytest.mark.parametrize("move", ["rebound", "released"])
def test_a_tensor_that_moved_is_refused_by_name(move: str):
    """Memory that is no longer there is not read: start() names the tensors, and preparing again helps."""
    tensors = {name: random_bytes(4096, seed) for seed, name in enumerate(("stays", "goes"))}
    prepared = prepare(tensors)
    if move == "rebound":
        tensors["goes"].data = tensors["goes"].clone()
    else:
        tensors["goes"].untyped_storage().resize_(0)

    with pytest.raises(ValueError, match=r"goes.*prepare\(\)") as refused:
        prepared.start()
    assert "stays" not in str(refused.value)
    if move == "rebound":
        assert prepare(tensors).start().read() == expected(tensors)


def test_many_at_once_equal_one_at_a_time():
    """Tensors do not disturb each other."""
    tensors = some_tensors()

    assert fingerprints(tensors) == {name: fingerprints({"": tensor})[""] for name, tensor in tensors.items()}


@pytest.mark.parametrize("nbytes", [1 << 20, 64 << 20, 8 << 30])
def test_llama_shapes_have_about_the_size(nbytes: int):
    """165 weights, of the asked size in bfloat16 within a fifth (small models come in coarse steps)."""
    shapes = llama_shapes(nbytes)
    size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())

    assert len(shapes) == 165
    assert size == pytest.approx(nbytes, rel=0.2 if nbytes == 1 << 20 else 0.03)


def test_llama_shapes_refuse_no_size():
    """A model of no bytes is refused."""
    with pytest.raises(ValueError, match="positive"):
        llama_shapes(0)


def test_measurement_runs_and_compares():
    """The measurement runs at a small size, over all tensors, and its ratios are those of its times."""
    found = measure(nbytes=1 << 20, rounds=2).to_plain()

    assert found["tensors"] == 165
    assert found["differing"] == ()
    assert found["compared_bytes"] == found["nbytes"] > 0
    assert found["over_sum_flat"] == found["device_s"] / found["sum_flat_s"]
    assert found["share_of_copy"] == found["whole_s"] / found["copy_out_s"]
    assert min(value for name, value in found.items() if name.endswith("_s")) > 0
