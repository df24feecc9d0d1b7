"""The engine ``local``: which updates it takes, how, and what memory it gives back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve
from rollout_help import (  # noqa: F401
    LONG,
    PROMPTS,
    _engine,
    _one_thread,
    _process,
    _ready,
    _trainer,
    greedy,
    in_background,
    llama,
    running,
    wait_until,
)

from lifecycle.errors import EngineError
from lifecycle.sync.base import UpdateManifest
from lifecycle.sync.shared_memory import SharedMemoryTransport
from lifecycle.testing.engine_contract import shared_memory_update, take


def test_every_name_that_does_not_fit_is_named(ready, trainer):
    """Missing, unknown, doubled, cast and reshaped tensors are all named in one refusal, and nothing was written."""
    with shared_memory_update(trainer.state_dict(), 2) as (manifest, transport):
        first, second, third, fourth, *rest = manifest.tensors
        changed = (
            evolve(first, dtype="bfloat16"),
            evolve(second, shape=(2, 2)),
            evolve(third, name="stranger"),
            fourth,
            fourth,
            *rest,
        )
        ready.pause_generation()
        with pytest.raises(EngineError) as refused:
            ready.begin_update(evolve(manifest, tensors=changed), transport)
    reason = str(refused.value)

    assert f"dtype differs: {first.name} (sent bfloat16, here float32)" in reason
    assert f"shape differs: {second.name} (sent (2, 2), here {second.shape})" in reason
    assert "unknown names: stranger" in reason
    assert f"missing names: {third.name}" in reason
    assert f"sent more than once: {fourth.name}" in reason
    ready.continue_generation()
    assert ready.weight_version == 1
    (answer,) = ready.generate(PROMPTS[:1], max_new_tokens=8, eos_token_id=None)
    assert [answer["tokens"]] == greedy(trainer, PROMPTS[:1], 8)


def test_one_flipped_bit_is_found(engine, trainer):
    """check_weights compares what really arrived: a bit that changed on the way is found, by name."""
    with shared_memory_update(trainer.state_dict(), 1) as (manifest, transport):
        sent, fd = manifest.tensors[3], transport.segments[0].fd
        (byte,) = os.pread(fd, 1, sent.offset + 5)
        os.pwrite(fd, bytes([byte ^ 4]), sent.offset + 5)
        engine.begin_update(manifest, transport)
        fingerprints = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}

        assert engine.check_weights(fingerprints) == (sent.name,)
        engine.abort_update()


def test_bytes_are_read_before_begin_returns(engine, trainer):
    """Once begin_update has returned the sender may overwrite its memory."""
    with shared_memory_update(trainer.state_dict(), 1) as (manifest, transport):
        engine.begin_update(manifest, transport)
        os.pwrite(transport.segments[0].fd, bytes(1000), 0)
        assert engine.check_weights({tensor.name: tensor.fingerprint for tensor in manifest.tensors}) == ()
        engine.end_update(1)


def mapped_segments(engine):
    maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return [line for line in maps if "memfd:update" in line]


def test_mappings_are_kept_and_dropped(engine, trainer):
    """A segment that comes again stays mapped; one that is not in the newest update is unmapped."""
    weights = trainer.state_dict()
    with shared_memory_update(weights, 1, segment=4) as (manifest, transport):
        take(engine, manifest, transport)
        first = mapped_segments(engine)
        take(engine, manifest, transport)

        assert mapped_segments(engine) == first
        assert len(first) == 1
        assert all(line.split()[1] == "r--s" for line in first)
    with shared_memory_update(weights, 2, segment=5) as sent:
        take(engine, *sent)
        assert len(mapped_segments(engine)) == 1
        assert mapped_segments(engine) != first
        assert engine.status()["segments"] == [5]


def test_reused_segment_id_is_not_believed(engine, trainer):
    """Another memory under an id that was seen before is mapped anew."""
    with shared_memory_update(trainer.state_dict(), 1, segment=4) as sent:
        take(engine, *sent)
    other = {name: tensor + 1 for name, tensor in trainer.state_dict().items()}
    with shared_memory_update(other, 2, segment=4) as sent:
        take(engine, *sent)


def test_wrong_segments_are_refused(engine, trainer):
    """Segments that are closed, too short, or not there are refused before a byte is read."""
    with shared_memory_update(trainer.state_dict(), 1) as (manifest, transport):
        (segment,) = transport.segments
        wrong = {
            "not open": (evolve(segment, fd=10_000),),
            "its file has": (evolve(segment, nbytes=segment.nbytes + 1),),
            "segment 0 did not come": (evolve(segment, id=9),),
            "can not be read": (evolve(segment, nbytes=4096),),
        }
        for reason, segments in wrong.items():
            with pytest.raises(EngineError, match=reason):
                engine.begin_update(manifest, SharedMemoryTransport(segments))
        read, write = os.pipe()
        with pytest.raises(EngineError, match="its file has 0"):
            engine.begin_update(manifest, SharedMemoryTransport((evolve(segment, fd=read),)))
        os.close(read)
        os.close(write)
        take(engine, manifest, transport)


def test_other_transports_are_refused(engine):
    """A transport it can not take weights by is refused by name."""

    class Carrier:
        name = "pigeon"
        needs_host_copy = False

    with pytest.raises(EngineError, match="takes shared_memory, not pigeon"):
        engine.begin_update(UpdateManifest(1, ()), Carrier())


# Memory


def test_released_memory_is_really_free(ready):
    """On return from release the process's own memory is smaller by the weights; resume takes as much again."""
    nbytes = ready.status()["pools"]["weights"]["nbytes"]
    assert nbytes > 2 * 32768 * 64 * 4
    ready.release(("kv_cache",))
    before = ready.status()["memory"]["anon"]
    ready.release(("weights",))
    released = ready.status()
    ready.resume(("weights",))
    resumed = ready.status()

    assert before - released["memory"]["anon"] > 0.97 * nbytes
    assert resumed["memory"]["anon"] - released["memory"]["anon"] > 0.97 * nbytes
    assert released["pools"]["weights"] == {"state": "released", "nbytes": 0}
    assert released["pools"]["kv_cache"]["state"] == "released"
    assert resumed["weight_version"] is None


def test_memory_is_flat_over_cycles(ready, trainer):
    """Release, resume and update leave nothing behind."""

    def cycle(version):
        ready.release()
        ready.resume()
        with shared_memory_update(trainer.state_dict(), version) as sent:
            take(ready, *sent)
        return ready.status()["memory"]["anon"]

    cycle(2)
    first = cycle(3)
    assert max(cycle(version) for version in range(4, 7)) < first + 4 * 2**20
