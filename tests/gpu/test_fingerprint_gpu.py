"""Fingerprints on a CUDA device: the CPU's values for any tensor, in stream order, without waiting."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fingerprint_help import DTYPES, logical_bytes, random_bytes, reference

from lifecycle.bench.fingerprint import measure
from lifecycle.fingerprint import (
    KERNEL_CHUNK_BYTES,
    combined,
    fingerprint,
    fingerprints,
    kernel_problem,
    partial,
    prepare,
)
from lifecycle.fingerprint_shards import shard_partials

pytestmark = pytest.mark.gpu
LONG = 200_000_000  # cycles of a sleep on the device: about a tenth of a second


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return fingerprints({name: tensor.cpu() for name, tensor in tensors.items()})


def odd_views(raw: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of uint8 of shape (n,), n ≥ 20000, that no table row can describe, and a few that one can."""
    plane = raw[:20_000].view(torch.float32).view(50, 100)
    numbers = torch.view_as_complex(raw[:4000].float().view(2000, 2))  # negated, a NaN's bits differ between devices
    return {
        "empty": raw[:0],
        "byte": raw[:1],
        "misaligned": raw[3:19_001],
        "half a word": raw[4:17_000],
        "not 16": raw[8:19_999],
        "strided": raw.view(torch.int16)[::3],
        "transposed": plane.t(),
        "expanded": plane[:1].expand(7, 100),
        "columns": plane[:, 3:50],
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "scalar": plane[3, 4],
    }


def test_the_kernel_is_used():
    """On a CUDA machine Triton is expected to work; every other test here would pass without it."""
    assert kernel_problem(device()) is None
    assert prepare({"t": torch.zeros(8, device=device())})._works[0].table is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_equals_the_definition(dtype: torch.dtype):
    """The kernel, torch's sums on the device, and the CPU all give the sum over the bytes."""
    raw = random_bytes(48_000)
    host = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    there = host.to(device())

    expected = reference(logical_bytes(host))
    assert fingerprint(there) == expected
    assert prepare({"": there}, kernel=False).start().read()[""] == expected


def test_odd_views_equal_the_cpu():
    """Strides, offsets, lazy conjugates, nothing at all: by the bytes in logical order."""
    raw = random_bytes(20_016)

    host, there = odd_views(raw), odd_views(raw.to(device()))
    expected = {name: reference(logical_bytes(tensor)) for name, tensor in host.items()}

    assert fingerprints(there) == expected
    assert {name: fingerprint(tensor) for name, tensor in there.items()} == expected


@pytest.mark.parametrize("start", [0, 8])
def test_lengths_around_words_blocks_and_chunks(start: int):
    """Every way in which a tensor can end, in a word, a block or a chunk, at both alignments that the kernel reads."""
    from lifecycle.fingerprint_triton import BLOCK

    block, chunk = 8 * BLOCK, KERNEL_CHUNK_BYTES
    around = [n + d for n in (0, 8, 16, block, chunk, 3 * chunk) for d in (-8, -1, 0, 1, 7, 8, 13) if n + d >= 0]
    raw = random_bytes(start + max(around))
    there = raw.to(device())

    found = fingerprints({str(n): there[start : start + n] for n in around})

    assert found == fingerprints({str(n): raw[start : start + n] for n in around})


def test_a_thousand_tiny_tensors():
    """Of 0 to 999 bytes, each in memory of its own and as neighbours at any address."""
    raw = random_bytes(500_000)
    own = {f"own {n}": raw[n : 2 * n].to(device()) for n in range(1000)}
    there = raw.to(device())
    neighbours = {f"at {n}": there[n * (n - 1) // 2 :][:n] for n in range(1000)}

    assert fingerprints({**own, **neighbours}) == on_cpu({**own, **neighbours})


def test_large_tensor():
    """More than 2³² bytes: words beyond that, and across it, count at their places."""
    size = (5 << 30) + 12
    tensor = torch.zeros(size, dtype=torch.uint8, device=device())
    places = (0, (2 << 30) - 1000, (4 << 30) - 1001, size - 3000)
    values = []
    for seed, place in enumerate(places):
        content = random_bytes(3000, seed)
        tensor[place : place + 3000] = content.to(device())
        values.append(partial(content, place))

    assert fingerprint(tensor) == combined(values)
    assert prepare({"": tensor}, kernel=False).start().read()[""] == combined(values)


def test_the_value_is_the_same_every_time():
    """Twenty runs over 256 MiB: the order in which programs add up makes no difference."""
    tensor = random_bytes(256 << 20, device="cuda")
    prepared = prepare({"t": tensor})

    values = {prepared.start().read()["t"] for _ in range(20)}

    assert values == {fingerprint(tensor.cpu())}


def test_starts_are_ordered_on_their_stream():
    """A start sees what its stream wrote before and not what it writes after; several are in flight at once."""
    first, second = (random_bytes(64 << 20, seed).to(device()) for seed in (1, 2))
    expected = [fingerprint(first), fingerprint(second)]
    tensor = torch.zeros_like(first)
    prepared = prepare({"t": tensor})
    assert [warm.read() for warm in (prepared.start(), prepared.start())] == [{"t": "0" * 16}] * 2
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        tensor.copy_(first)
        one = prepared.start()
        tensor.copy_(second)
        two = prepared.start()
        tensor.zero_()
        waited = stream.query()

    assert [two.read()["t"], one.read()["t"]] == expected[::-1]
    assert not waited
    assert one.read()["t"] == expected[0]
    torch.cuda.synchronize()
    assert prepared.start().read()["t"] == "0" * 16


def test_reading_waits_for_its_own_sums_alone():
    """Another stream that is busy for long does not hold up a result."""
    tensor = random_bytes(1 << 20).to(device())
    prepared = prepare({"t": tensor})
    expected = prepared.start().read()
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(busy):
        torch.cuda._sleep(5 * LONG)
    found = prepared.start().read()
    still_busy = not busy.query()
    torch.cuda.synchronize()

    assert found == expected
    assert still_busy


@pytest.mark.filterwarnings("ignore::UserWarning")  # the mode calls itself a prototype
def test_start_never_synchronises():
    """Neither the kernel's way nor torch's has an operation that waits for the device."""
    tensors = odd_views(random_bytes(20_016).to(device()))
    prepared = prepare(tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = prepared.start()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert started.read() == on_cpu(tensors)


def test_results_outlive_the_prepared():
    """A start on another stream reads its table even though that was given up meanwhile."""
    tensor = random_bytes(32 << 20).to(device())
    expected = fingerprint(tensor)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    prepared = prepare({"t": tensor})  # its table belongs to the default stream
    with torch.cuda.stream(stream):
        started = prepared.start()
    del prepared
    overwriting = [torch.zeros(256, dtype=torch.int64, device=device()) for _ in range(20)]

    assert started.read() == {"t": expected}
    assert not any(found.any() for found in overwriting)


def test_memory_that_moved_is_refused():
    """A released or rebound storage is not read; the tensor is named."""
    tensors = {name: random_bytes(4096).to(device()) for name in ("stays", "released", "rebound")}
    prepared = prepare(tensors)
    tensors["released"].untyped_storage().resize_(0)
    tensors["rebound"].data = tensors["rebound"].clone()

    with pytest.raises(ValueError, match="released, rebound"):
        prepared.start()


def test_pieces_on_the_device_add_up():
    """Byte ranges at any offset, prepared together or alone, and far into a tensor."""
    raw = random_bytes(3 << 20)
    there = raw.to(device())
    edges = [0, 1, 8, 1 << 20, (1 << 20) + 3, (2 << 20) + 8, 3 << 20]
    pieces = {str(start): there[start:end].clone() for start, end in pairwise(edges)}
    firsts = {name: int(name) for name in pieces}

    assert combined(prepare(pieces, firsts).start().partials().values()) == fingerprint(raw)
    assert combined(partial(piece, firsts[name]) for name, piece in pieces.items()) == fingerprint(raw)
    assert [partial(there, first) for first in (40 << 30, (40 << 30) + 5)] == [
        partial(raw, first) for first in (40 << 30, (40 << 30) + 5)
    ]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_shards_on_the_device_add_up(dim: int, dtype: torch.dtype):
    """Equal shards along each dimension have the whole's fingerprint together."""
    whole = random_bytes(96 * 33 * 12 * dtype.itemsize).view(dtype).view(96, 33, 12)
    values: list[int] = []
    shards = whole.to(device()).chunk(3, dim)
    for number, shard in enumerate(shards):
        offsets = [0, 0, 0]
        offsets[dim] = number * shards[0].shape[dim]
        values += shard_partials(shard.clone(), whole.shape, offsets)

    assert combined(values) == fingerprint(whole)


def test_devices_together():
    """Tensors of the CPU and of every device in one Prepared."""
    raw = random_bytes(100_003)
    places = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    tensors = {place: raw[index:].to(place) for index, place in enumerate(places)}
    current = torch.cuda.current_device()

    assert fingerprints(tensors) == on_cpu(tensors)
    assert torch.cuda.current_device() == current


def test_inference_mode_and_parameters():
    """Tensors of inference mode, and parameters that need gradients, are read like any other."""
    host = torch.randn(1000)
    with torch.inference_mode():
        assert fingerprint(host.to(device())) == fingerprint(host)
    assert fingerprint(torch.nn.Parameter(host.to(device()))) == fingerprint(host)


def test_measurement_runs_and_compares():
    """The measurement, at a small size: by the kernel, over all weights, equal to the CPU's values."""
    found = measure(nbytes=64 << 20, rounds=3)

    assert found.without_kernel is None
    assert found.differing == ()
    assert found.compared_bytes == found.nbytes
