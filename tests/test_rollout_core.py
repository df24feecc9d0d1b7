"""The engine without its process, and its loop over a socket: what is hard to reach from outside."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from rollout_help import LONG, llama, wait_until

from lifecycle.errors import EngineError
from lifecycle.fingerprint import fingerprint
from lifecycle.rollout.core import EngineCore
from lifecycle.rollout.generation import build_model
from lifecycle.rollout.messages import receive_message, send_message
from lifecycle.rollout.weights import manifest_from_plain
from lifecycle.rollout.worker import Worker
from lifecycle.sync.base import SentTensor, UpdateManifest
from lifecycle.sync.shared_memory import Segment, SharedMemoryTransport
from lifecycle.testing.engine_contract import shared_memory_update


@contextmanager
def sent_plain(tensors, version):
    with shared_memory_update(tensors, version) as (manifest, transport):
        segments = [{"id": segment.id, "nbytes": segment.nbytes} for segment in transport.segments]
        yield manifest.to_plain(), segments, [segment.fd for segment in transport.segments]


@contextmanager
def running_core(model):
    core = EngineCore("core", model)
    thread = threading.Thread(target=core.run)
    thread.start()
    try:
        yield core
    finally:
        core.stop()
        thread.join()


def ask(core, prompts, **options):
    outcomes, arrived = [], threading.Event()

    def done(outcome):
        outcomes.append(outcome)
        arrived.set()

    core.admit(prompts, options, done)
    assert arrived.wait(60)
    return outcomes[0]


def small(**changes):
    return build_model(llama(vocab_size=256, **changes).to_dict(), "float32", "sdpa")


def test_copy_that_fails_half_way_leaves_no_version(monkeypatch):
    """When copying fails in the middle, there is no version and no open update, and a later update heals it."""
    weights = small().state_dict()
    with running_core(small()) as core, sent_plain(weights, 1) as sent:
        core.begin_update(*sent)
        core.end_update(1)
        copied = []

        def fail_at_third(target, source, original=np.copyto):
            copied.append(source)
            if len(copied) == 3:
                raise MemoryError("no more")
            original(target, source)

        monkeypatch.setattr(np, "copyto", fail_at_third)
        with pytest.raises(MemoryError):
            core.begin_update(*sent)
        monkeypatch.undo()

        assert core.weight_version is None
        assert (core.status()["update"], core.status()["paused"]) == (None, "abort")
        with pytest.raises(EngineError, match="no version"):
            core.admit([[1]], {}, print)
        core.begin_update(*sent)
        core.end_update(1)
        core.continue_generation()
        assert ask(core, [[1]], max_new_tokens=1)[0]["weight_version"] == 1


def test_tied_names_come_once_or_twice():
    """Names tied in the engine's model may come once or each; with different contents they are refused."""
    tied = small(tie_word_embeddings=True)
    core = EngineCore("tied", tied)
    weights = dict(small(tie_word_embeddings=True).state_dict())
    embedding = weights.pop("model.embed_tokens.weight")
    for version, extra in enumerate(({}, {"model.embed_tokens.weight": embedding})):
        with sent_plain({**weights, **extra}, version) as sent:
            core.begin_update(*sent)
            core.end_update(version)
        assert fingerprint(tied.model.embed_tokens.weight) == fingerprint(embedding)
    with (
        sent_plain({**weights, "model.embed_tokens.weight": embedding + 1}, 5) as sent,
        pytest.raises(EngineError, match=r"one tensor here.*(lm_head|embed_tokens)\.weight = "),
    ):
        core.begin_update(*sent)


def test_strided_tensors_are_read_in_place():
    """A tensor that lies strided in the sender's memory arrives as what it is."""
    model = small()
    weights = model.state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    core = EngineCore("strided", small())
    flipped = {key: tensor.t().contiguous() if key == name else tensor for key, tensor in weights.items()}
    with sent_plain(flipped, 1) as (manifest, segments, fds):
        for sent in manifest["tensors"]:
            if sent["name"] == name:
                rows, columns = sent["shape"]
                sent.update(shape=[columns, rows], stride=[1, columns])
        core.begin_update(manifest, segments, fds)
        assert core.check_weights({name: fingerprint(weights[name])}) == []


def test_transient_buffers_survive_release():
    """Rotary tables are not in the pool: they need not come, may come, and outlive a release."""
    model, source = small(), small()
    name = "model.rotary_emb.inv_freq"
    table = model.get_buffer(name).clone()
    core = EngineCore("rotary", model)
    core.release(("weights",))
    core.resume(("weights",))
    assert torch.equal(model.get_buffer(name), table)
    with sent_plain({**source.state_dict(), name: table * 2}, 1) as sent:
        core.begin_update(*sent)
        core.end_update(1)
    assert torch.equal(model.get_buffer(name), table * 2)


def test_failure_of_generation_is_an_error_of_that_request():
    """A request that fails tells why, and the next one runs."""
    model = small()
    with running_core(model) as core, sent_plain(small().state_dict(), 1) as sent:
        core.begin_update(*sent)
        core.end_update(1)
        generate = model.generate
        model.generate = lambda **_: 1 / 0
        assert "ZeroDivisionError" in ask(core, [[1]]).reason
        model.generate = generate
        assert ask(core, [[1]], max_new_tokens=1, pad_token_id=3)[0]["weight_version"] == 1


@pytest.fixture(name="core")
def _core():
    """An engine without a process that holds version 1."""
    with running_core(small()) as core, sent_plain(small().state_dict(), 1) as sent:
        core.begin_update(*sent)
        core.end_update(1)
        yield core


def test_core_pauses_between_tokens(core):
    """Without a process the same: keep freezes, continue goes on, abort ends, and what waits behind ends empty."""
    outcomes = []
    core.admit([[1]], {"max_new_tokens": 40, "eos_token_id": None}, outcomes.append)
    core.pause_generation("keep")
    core.flush_cache()
    assert not outcomes
    core.continue_generation()
    wait_until(lambda: outcomes)
    core.admit([[1]], LONG, outcomes.append)
    core.admit([[1], [2]], LONG, outcomes.append)
    wait_until(lambda: core.status()["requests"] == {"running": 1, "frozen": 0, "waiting": 1})
    core.pause_generation("abort")
    wait_until(lambda: len(outcomes) == 3)
    finished, aborted, empty = outcomes

    assert (finished[0]["finish_reason"], len(finished[0]["tokens"])) == ("length", 40)
    assert aborted[0]["finish_reason"] == "abort"
    assert empty == [{"tokens": [], "finish_reason": "abort", "weight_version": 1}] * 2
    core.abort_update()
    core.release(())
    core.release(("kv_cache",))
    core.resume(("kv_cache",))
    assert core.weight_version is None


def test_core_samples(core):
    """Without a process the same: seeded samples repeat, and carry their log-probabilities."""
    options = {"max_new_tokens": 3, "do_sample": True, "seed": 1, "logprobs": True, "eos_token_id": None}
    first, again = ask(core, [[1, 5], [7]], **options), ask(core, [[1, 5], [7]], **options)
    assert first == again
    assert all(len(answer["logprobs"]) == 3 and max(answer["logprobs"]) < 0 for answer in first)
    assert ask(core, []) == []
    for prompts, wrong in (([[]], {}), ([[256]], {}), ([[1]], {"eos_token_id": "x"})):
        with pytest.raises(EngineError):
            core.admit(prompts, wrong, print)


def test_core_refuses_wrong_segments(core):
    """Without a process the same: a segment that is too short, is missing, or can not be mapped, changes nothing."""
    with sent_plain(small().state_dict(), 2) as (manifest, _, fds):
        folder = os.open("/", os.O_RDONLY)
        for wrong, descriptors, reason in (
            ([{"id": 0, "nbytes": 2**40}], fds, "its file has"),
            ([{"id": 0, "nbytes": 64}], fds, "can not be read"),
            ([{"id": 7, "nbytes": 64}], fds, "did not come"),
            ([{"id": 0, "nbytes": 1}], [folder], "can not be mapped"),
        ):
            with pytest.raises(EngineError, match=reason):
                core.begin_update(manifest, wrong, descriptors)
        os.close(folder)
    assert core.weight_version == 1


def test_long_lists_of_names_are_cut():
    """A refusal names the first of many offenders and counts the rest."""
    core = EngineCore("many", small())
    with pytest.raises(EngineError, match=r"missing names: .* and 1 more$"):
        core.begin_update({"version": 1, "tensors": []}, [], [])


def test_other_dtypes_arrive_bit_for_bit():
    """The element size does not matter: half-precision weights arrive as they are, zero-sized tensors too."""
    config = llama(vocab_size=256).to_dict()
    model = build_model(config, "bfloat16")
    model.register_buffer("nothing", torch.empty(0, dtype=torch.float64))
    model.register_buffer("flag", torch.tensor(True))
    core = EngineCore("half", build_model(config, "bfloat16"))
    with sent_plain({name: w for name, w in model.state_dict().items() if "." in name}, 1) as sent:
        core.begin_update(*sent)
        assert core.check_weights({name: fingerprint(w) for name, w in model.named_parameters()}) == []
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    whole = EngineCore("whole", model)
    with sent_plain(weights, 1) as sent:
        whole.release(("weights",))
        whole.resume(("weights",))
        assert not model.flag
        whole.begin_update(*sent)
    assert model.flag


# The worker's loop, over a socket in this process


class InProcess:
    """A front for a Worker that runs in a thread."""

    def __init__(self):
        self.ours, self.theirs = socket.socketpair()
        self.outcome = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        try:
            Worker(self.theirs).serve()
        except ValueError as error:
            self.outcome.append(error)

    def call(self, operation, fds=(), **arguments):
        send_message(self.ours, {"id": 1, "op": operation, "args": arguments}, fds)
        reply, _ = receive_message(self.ours)
        return reply

    def start(self, threads=None):
        config = llama(vocab_size=256).to_dict()
        options = {"attention": None, "dtype": "float32", "threads": threads, "seed": 0}
        return self.call("start", name="inside", config=config, **options)

    def close(self):
        """End of the connection; may be called again."""
        self.ours.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.theirs.close()


@pytest.fixture(name="inside")
def _inside():
    worker = InProcess()
    yield worker
    worker.close()


def test_worker_serves_a_whole_life(inside):
    """Start, update, generate, release: every operation is answered under its number."""
    assert "not been started" in inside.call("status")["error"]
    assert inside.start(threads=1) == {"id": 1, "result": None}
    assert "already" in inside.start()["error"]
    assert inside.call("status")["result"]["threads"] == 1
    with shared_memory_update(small().state_dict(), 1) as (manifest, transport):
        segment = {"id": 0, "nbytes": transport.segments[0].nbytes}
        descriptors = [transport.segments[0].fd]
        open_before = len(os.listdir("/proc/self/fd"))
        reply = inside.call("begin_update", descriptors, manifest=manifest.to_plain(), segments=[segment])
        assert reply == {"id": 1, "result": None}
        # The worker's mapping holds one descriptor of its own.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == open_before + 1)
    assert inside.call("end_update", version=1)["result"] is None
    assert inside.call("weight_version")["result"] == 1
    (answer,) = inside.call("generate", prompts=[[1]], options={"max_new_tokens": 2, "eos_token_id": None})["result"]
    assert len(answer["tokens"]) == 2
    assert "unknown options" in inside.call("generate", prompts=[[1]], options={"x": 1})["error"]
    assert inside.call("release", pools=["weights"])["result"] is None
    assert "released" in inside.call("generate", prompts=[[1]], options={})["error"]
    assert "pools" in inside.call("status", fds=[0])["result"]


def test_worker_refuses_wrong_requests_and_lives(inside):
    """An unknown operation, wrong arguments and a manifest that is none are errors of that request only."""
    assert "unknown operation 'dance'" in inside.call("dance")["error"]
    assert "config" in inside.call("start", name="x")["error"]
    assert (
        "ValueError"
        in inside.call("start", name="x", config={}, attention=None, dtype="float32", threads=1, seed=0)["error"]
    )
    inside.start()
    assert "TypeError" in inside.call("release", swimming=True)["error"]
    assert "refused" in inside.call("begin_update", manifest={"version": 1}, segments=[])["error"]
    assert (
        "0 segments came with 1"
        in inside.call("begin_update", [0], manifest={"version": 1, "tensors": []}, segments=[])["error"]
    )
    assert inside.call("weight_version") == {"id": 1, "result": None}


def test_worker_reports_a_failed_generation(inside, monkeypatch):
    """A request that is accepted and then fails is answered with its error."""
    inside.start()
    with shared_memory_update(small().state_dict(), 1) as (manifest, transport):
        segment = {"id": 0, "nbytes": transport.segments[0].nbytes}
        inside.call("begin_update", [transport.segments[0].fd], manifest=manifest.to_plain(), segments=[segment])
    inside.call("end_update", version=1)
    monkeypatch.setattr("lifecycle.rollout.core.Generator.generate", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in inside.call("generate", prompts=[[1]], options={})["error"]


@pytest.mark.parametrize("message", [b"{}", b'{"id": "1", "op": "status", "args": {}}', b"[]"])
def test_worker_ends_on_a_malformed_message(inside, message):
    """What is no request ends the worker: the two sides are not in step any more."""
    inside.ours.sendall(len(message).to_bytes(4, "big") + message)
    inside.thread.join(20)
    assert "MalformedMessage" in type(inside.outcome[0]).__name__


def test_worker_survives_a_front_that_does_not_listen(inside):
    """A reply that nobody takes is dropped; the end of the connection ends the worker, in silence."""
    inside.ours.shutdown(socket.SHUT_RD)
    send_message(inside.ours, {"id": 1, "op": "status", "args": {}})
    inside.close()
    assert not inside.outcome


def test_worker_tells_of_a_reply_too_large(inside, monkeypatch):
    """A result that does not fit into a message becomes an error, not silence."""
    inside.start()
    monkeypatch.setattr("lifecycle.rollout.messages.LIMIT", 300)
    assert "over the limit" in inside.call("status")["error"]


def test_sent_tensor_survives_the_journey():
    """A manifest is the same after it was plain data."""
    manifest = UpdateManifest(1, (SentTensor("a", "float32", (2, 3), (3, 1), 0, 64, "0" * 16),))
    assert manifest_from_plain(manifest.to_plain()) == manifest


def test_segments_are_a_tuple():
    """The transport keeps its segments in order, whatever they came in."""
    segment = Segment(1, 5, 10)
    assert SharedMemoryTransport([segment]).segments == (segment,)
