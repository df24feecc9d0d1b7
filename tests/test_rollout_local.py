"""The engine ``local``: what it generates, what it refuses, what it gives back, and how it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, LlamaConfig

from lifecycle.errors import EngineError
from lifecycle.fingerprint import fingerprint
from lifecycle.rollout import local
from lifecycle.rollout.core import EngineCore
from lifecycle.rollout.generation import build_model
from lifecycle.rollout.link import WorkerLink
from lifecycle.rollout.local import LocalEngine
from lifecycle.rollout.messages import receive_message, send_message
from lifecycle.rollout.worker import Worker
from lifecycle.sync.base import SentTensor, UpdateManifest
from lifecycle.sync.shared_memory import Segment, SharedMemoryTransport
from lifecycle.testing.engine_contract import shared_memory_update, take

PROMPTS = [[1, 5, 9, 200], [7], [3, 3, 250, 17, 90, 4]]
LONG = {"max_new_tokens": 2000, "eos_token_id": None}
ROOT = Path(local.__file__).parents[2]


def llama(**changes):
    # The large vocabulary makes the weights large enough to be seen in the process's memory.
    shape = {
        "vocab_size": 32768,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**shape, **changes})


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The engine's threads would be in the way of ours, and the other way round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="trainer", scope="module")
def _trainer():
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(llama()).eval()


@pytest.fixture(name="process", scope="module")
def _process():
    with LocalEngine(llama(), threads=1) as engine:
        yield engine


@pytest.fixture(name="engine")
def _engine(process):
    """The shared process, alive, with no version, resident and not paused."""
    if not process.alive:
        process.restart()
    process.abort_update()
    process.resume()
    process.continue_generation()
    return process


@pytest.fixture(name="ready")
def _ready(engine, trainer):
    """The same with the trainer's weights as version 1."""
    with shared_memory_update(trainer.state_dict(), 1) as sent:
        take(engine, *sent)
    return engine


def greedy(model, prompts, count):
    """The trainer's own answer for one left-padded batch."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    return output[:, longest:].tolist()


@contextmanager
def in_background(function, *arguments, **options):
    """Runs the call in another thread; the list gets its result or error, and is complete after the block."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments, **options))
        except EngineError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join()


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def running(engine):
    return engine.status()["requests"]["running"] == 1


# Generation


def test_greedy_equals_the_trainers_own(ready, trainer):
    """With the same weights the engine's greedy tokens are the trainer's, also for prompts of different lengths."""
    answers = ready.generate(PROMPTS, max_new_tokens=12, eos_token_id=None)

    assert [answer["tokens"] for answer in answers] == greedy(trainer, PROMPTS, 12)
    assert [answer["weight_version"] for answer in answers] == [1, 1, 1]


def test_generates_with_the_newest_weights(ready, trainer):
    """After an update the answers are those of the new weights, not of anything kept from the old ones."""
    torch.manual_seed(2)
    newer = AutoModelForCausalLM.from_config(llama()).eval()
    with shared_memory_update(newer.state_dict(), 2) as sent:
        take(ready, *sent)
    (answer,) = ready.generate(PROMPTS[:1], max_new_tokens=8, eos_token_id=None)

    assert [answer["tokens"]] == greedy(newer, PROMPTS[:1], 8) != greedy(trainer, PROMPTS[:1], 8)
    assert answer["weight_version"] == 2


def test_stops_at_the_end_of_sequence(ready, trainer):
    """An answer ends with its end of sequence, whatever the others in its batch do."""
    plain = greedy(trainer, PROMPTS, 6)
    answers = ready.generate(PROMPTS, max_new_tokens=6, eos_token_id=[plain[0][2]])

    assert answers[0]["finish_reason"] == "stop"
    assert answers[0]["tokens"] == plain[0][: plain[0].index(plain[0][2]) + 1]
    assert answers[1]["finish_reason"] == "length"
    assert answers[1]["tokens"] == plain[1]


def test_log_probabilities_are_the_models_own(ready, trainer):
    """Log-probabilities belong to the sampled tokens, under the model's distribution before temperature and top-p."""
    options = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 50, "seed": 3}
    (answer,) = ready.generate(PROMPTS[:1], **options, logprobs=True, eos_token_id=None)
    whole = torch.tensor([PROMPTS[0] + answer["tokens"]])
    with torch.no_grad():
        expected = trainer(whole).logits.log_softmax(-1)[0, len(PROMPTS[0]) - 1 : -1]

    chosen = expected.gather(1, torch.tensor(answer["tokens"])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer["logprobs"]), chosen, rtol=1e-4, atol=1e-4)


def test_seed_repeats_a_sample(ready):
    """The same seed gives the same sample, and does not disturb requests without one."""
    options = {"max_new_tokens": 6, "do_sample": True, "eos_token_id": None}
    first, other, again = (ready.generate(PROMPTS, seed=seed, **options) for seed in (5, 6, 5))
    assert first == again != other
    assert ready.generate(PROMPTS, **options) != ready.generate(PROMPTS, **options)


def test_no_prompts_no_answers(ready):
    """An empty batch is answered with an empty list."""
    assert ready.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "reason"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[32768]], {}, "the vocabulary has 32768"),
        ([[-1]], {}, "token -1"),
        (["text"], {}, "lists of token ids"),
        ([[1]], {"max_tokens": 3}, "unknown options max_tokens; known: max_new_tokens"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"temperature": 0.0}, "temperature"),
        ([[1]], {"eos_token_id": "end"}, "eos_token_id"),
        ([[1]], {"seed": object()}, "can not be sent"),
    ],
)
def test_wrong_requests_are_refused_by_name(ready, prompts, options, reason):
    """A request that can not be carried out is refused with the reason, and the engine goes on."""
    with pytest.raises(EngineError, match=reason):
        ready.generate(prompts, **options)
    assert ready.generate([[1]], max_new_tokens=1, eos_token_id=7)


def test_text_needs_a_tokenizer(ready):
    """Text goes through the tokenizer that was given, and is refused without one."""

    class Digits:
        def __call__(self, text):
            return {"input_ids": [int(digit) for digit in text]}

        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            return " ".join(map(str, tokens))

    with pytest.raises(EngineError, match="no tokenizer"):
        ready.generate_text(["12"])
    ready.tokenizer = Digits()
    (answer,) = ready.generate_text(["12"], max_new_tokens=2)
    ready.tokenizer = None
    assert answer["text"] == " ".join(map(str, answer["tokens"]))


# Pausing


def test_abort_ends_a_request_with_its_tokens_so_far(ready, trainer):
    """An aborted request answers the tokens it has, a beginning of what it would have said."""
    with in_background(ready.generate, PROMPTS[:1], **LONG) as outcome:
        wait_until(lambda: running(ready))
        time.sleep(0.1)
        ready.pause_generation("abort")
        assert ready.status()["requests"] == {"running": 0, "frozen": 0, "waiting": 0}
    ((answer,),) = outcome

    assert (answer["finish_reason"], answer["weight_version"]) == ("abort", 1)
    assert 0 < len(answer["tokens"]) < 2000
    assert answer["tokens"][:20] == greedy(trainer, PROMPTS[:1], 20)[0][: len(answer["tokens"])]


def test_waiting_pause_lets_accepted_requests_finish(ready):
    """A waiting pause returns after every accepted request has finished, and admits no other meanwhile."""
    options = {"max_new_tokens": 150, "eos_token_id": None}
    with in_background(ready.generate, PROMPTS[:1], **options) as first:
        wait_until(lambda: running(ready))
        with in_background(ready.generate, PROMPTS[:1], **options) as second:
            wait_until(lambda: ready.status()["requests"]["waiting"] == 1)
            with in_background(ready.pause_generation, "wait") as paused:
                wait_until(lambda: ready.status()["paused"] == "wait")
                with pytest.raises(EngineError, match="paused"):
                    ready.generate(PROMPTS[:1])
                assert not paused
            assert ready.status()["requests"] == {"running": 0, "frozen": 0, "waiting": 0}

    for ((answer,),) in (first, second):
        assert (answer["finish_reason"], len(answer["tokens"])) == ("length", 150)


def test_status_overtakes_a_running_request(ready):
    """Replies come in any order: status answers while a request runs."""
    with in_background(ready.generate, PROMPTS[:1], **LONG) as outcome:
        wait_until(lambda: running(ready))
        assert ready.weight_version == 1
        assert not outcome
        ready.pause_generation("abort")


def test_kept_request_goes_on_where_it_was(ready, trainer):
    """A kept request stands still between two tokens and then finishes as if nothing had been."""
    with in_background(ready.generate, PROMPTS[:1], max_new_tokens=150, eos_token_id=None) as outcome:
        wait_until(lambda: running(ready))
        ready.pause_generation("keep")
        assert ready.status()["requests"]["frozen"] == 1
        ready.flush_cache()
        with pytest.raises(EngineError, match="not finished"):
            ready.release()
        assert not outcome
        ready.continue_generation()
    ((answer,),) = outcome

    assert (answer["finish_reason"], answer["weight_version"]) == ("length", 1)
    assert [answer["tokens"]] == greedy(trainer, PROMPTS[:1], 150)


def test_update_ends_kept_requests(ready, trainer):
    """What a kept request has computed belongs to the old weights, so an update ends it with the old version."""
    with in_background(ready.generate, PROMPTS[:1], **LONG) as frozen:
        wait_until(lambda: running(ready))
        with in_background(ready.generate, PROMPTS[:1], logprobs=True) as held_back:
            wait_until(lambda: ready.status()["requests"]["waiting"] == 1)
            ready.pause_generation("keep")
            with shared_memory_update(trainer.state_dict(), 2) as (manifest, transport):
                ready.begin_update(manifest, transport)
                ready.end_update(2)
            ready.continue_generation()
    ((first,),), ((second,),) = frozen, held_back

    assert (first["finish_reason"], first["weight_version"]) == ("abort", 1)
    assert second == {"tokens": [], "logprobs": [], "finish_reason": "abort", "weight_version": 1}
    assert ready.weight_version == 2


def test_running_request_refuses_what_would_change_its_weights(ready, trainer):
    """While a request runs, an update, a release and a flush are refused, and it goes on."""
    with in_background(ready.generate, PROMPTS[:1], **LONG) as outcome:
        wait_until(lambda: running(ready))
        with shared_memory_update(trainer.state_dict(), 2) as sent, pytest.raises(EngineError, match="pause_gen"):
            ready.begin_update(*sent)
        for refused in (ready.release, ready.flush_cache):
            with pytest.raises(EngineError, match="pause_generation"):
                refused()
        assert running(ready)
        ready.abort_update()
    assert outcome[0][0]["finish_reason"] == "abort"


def test_continue_ends_a_waiting_pause(ready):
    """A pause that is overtaken by continue_generation says that it did not happen."""
    with in_background(ready.generate, PROMPTS[:1], **LONG) as answered:
        wait_until(lambda: running(ready))
        with in_background(ready.pause_generation, "wait") as paused:
            wait_until(lambda: ready.status()["paused"] == "wait")
            ready.continue_generation()
        ready.pause_generation("abort")
    assert "continued" in str(paused[0])
    assert answered[0][0]["finish_reason"] == "abort"


# Updates


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
    assert max(cycle(version) for version in range(4, 8)) < first + 4 * 2**20


# Life and death


def test_death_while_idle(ready):
    """A killed process is told by every call, with the signal, until restart brings one with no version."""
    os.kill(ready.pid, signal.SIGKILL)
    wait_until(lambda: not ready.alive)

    assert ready.weight_version is None
    for call in (ready.status, ready.start, ready.abort_update, ready.release, lambda: ready.generate([[1]])):
        with pytest.raises(EngineError, match=r"SIGKILL.*restart\(\)"):
            call()
    ready.restart()
    assert ready.alive
    assert ready.weight_version is None
    with pytest.raises(EngineError, match="no version"):
        ready.generate([[1]])


def test_death_in_the_middle_of_a_request(ready):
    """A request whose process is killed fails at once with the signal, and so does one that waits behind it."""
    with (
        in_background(ready.generate, PROMPTS, **LONG) as first,
        in_background(ready.generate, PROMPTS, **LONG) as second,
    ):
        wait_until(lambda: ready.status()["requests"] == {"running": 1, "frozen": 0, "waiting": 1})
        os.kill(ready.pid, signal.SIGKILL)
    for (error,) in (first, second):
        assert isinstance(error, EngineError)
        assert "SIGKILL" in error.reason
    assert not ready.alive
    assert ready.weight_version is None


def test_forked_copy_is_refused(process):
    """A forked child can not use the engine, and neither using nor closing its copy harms the parent's."""
    if not process.alive:
        process.restart()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (process.status, process.start, process.restart, lambda: process.weight_version):
            try:
                call()
            except EngineError as error:
                refused += "forked" in str(error)
        process.close()
        os._exit(refused if not process.alive else 99)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 4
    assert process.status()["pid"] == process.pid


def test_close_is_final_and_repeatable():
    """A closed engine has no process and says so; closing again does nothing."""
    engine = LocalEngine({"model_type": "llama"}, start=False)
    assert (engine.alive, engine.pid, engine.weight_version) == (False, None, None)
    with pytest.raises(EngineError, match=r"start\(\) first"):
        engine.status()
    engine.close()
    engine.close()


def bare_link():
    """The real worker program, without a model: starts in a fraction of a second."""
    return WorkerLink("bare", local.WORKER_COMMAND, local._environment(), 10.0)


def serving(link):
    with pytest.raises(EngineError, match="not been started"):
        link.call("status", {}, 20.0)
    return True


def test_close_ends_the_process():
    """After close the process is gone and collected."""
    link = bare_link()
    assert serving(link)
    link.close()
    link.close()

    assert not psutil.pid_exists(link.pid)
    with pytest.raises(EngineError, match="closed"):
        link.call("status", {}, 1.0)


def test_outlives_the_thread_that_started_it():
    """An engine started in a short-lived thread lives on when that thread has ended."""
    links = []
    thread = threading.Thread(target=lambda: links.append(bare_link()))
    thread.start()
    thread.join()
    time.sleep(0.1)

    assert serving(links[0])
    links[0].close()


def test_dies_with_its_parent():
    """The process goes when its parent is killed, even while a forked child still holds the connection."""
    script = (
        "import os, time\n"
        "from lifecycle.errors import EngineError\n"
        "from lifecycle.rollout import local\n"
        "link = local.WorkerLink('orphan', local.WORKER_COMMAND, local._environment(), 10.0)\n"
        "try: link.call('status', {}, 20.0)\n"
        "except EngineError: pass\n"
        "child = os.fork()\n"
        "if child: print(link.pid, child, flush=True)\n"
        "time.sleep(300)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        worker, holder = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(worker)
        parent.kill()
        parent.wait()
        wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie")
        os.kill(holder, signal.SIGKILL)


STUB = "import socket, sys, time, signal, os; s = socket.socket(fileno=int(sys.argv[1]));"


@pytest.fixture(name="stub")
def _stub(monkeypatch):
    """Starts an engine whose process runs this code instead of the worker."""

    def start(code, **options):
        monkeypatch.setattr(local, "WORKER_COMMAND", (sys.executable, "-S", "-c", STUB + code))
        return LocalEngine({"model_type": "llama"}, **options)

    return start


def test_crash_shows_the_last_words(stub):
    """When the process crashes, its exit code and the end of its stderr are in the error."""
    with pytest.raises(EngineError, match=r"(?s)exited with code 3.*out of luck"):
        stub("sys.stderr.write('out of luck'); sys.exit(3)")


@pytest.mark.parametrize("reply", ["b'\\0\\0\\0\\x01{'", "b'\\0\\0\\0\\x02{}'", "b'\\xff\\xff\\xff\\xff'"])
def test_nonsense_from_the_process_ends_it(stub, reply):
    """A process that does not keep to the protocol is killed, and the error says so."""
    with pytest.raises(EngineError, match="malformed message"):
        stub(f"s.recv(4); s.sendall({reply}); time.sleep(60)")


def test_start_that_takes_too_long(stub):
    """A start that does not end in time is an error, and leaves no process behind."""
    before = psutil.Process().children()
    with pytest.raises(EngineError, match=r"start: no answer within 0\.1 s"):
        stub("s.recv(10 ** 6); s.recv(1)", startup_timeout=0.1)
    assert psutil.Process().children() == before


def test_hung_process_is_killed():
    """A process that neither reads nor listens to SIGTERM is killed by close, after the grace."""
    code = STUB + "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(2, b'deaf'); time.sleep(60)"
    link = WorkerLink("hung", (sys.executable, "-S", "-c", code), os.environ, 0.2)
    wait_until(lambda: link._tail() == "deaf")
    with pytest.raises(EngineError, match="SIGKILL"):
        link.call("status", {"text": "x" * 10_000_000}, 20.0)
    link.close(0.05)
    assert not psutil.pid_exists(link.pid)


def test_missing_program_is_an_error(monkeypatch):
    """Where the interpreter can not be run, the error says which program."""
    monkeypatch.setattr(local, "WORKER_COMMAND", ("/nowhere/python",))
    with pytest.raises(EngineError, match="/nowhere/python"):
        LocalEngine({})


def test_unknown_architecture_is_refused():
    """A config that transformers has no architecture for is refused; its code is not looked for anywhere."""
    for config, dtype in (({}, "float32"), ({"model_type": "x", "auto_map": {}}, "float32"), ({}, "int8")):
        with pytest.raises((ValueError, KeyError)):
            build_model(config, dtype)


# The engine without its process: what is hard to reach from outside


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

    def start(self):
        config = llama(vocab_size=256).to_dict()
        options = {"attention": None, "dtype": "float32", "threads": torch.get_num_threads(), "seed": 0}
        return self.call("start", name="inside", config=config, **options)

    def close(self):
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
    assert inside.start() == {"id": 1, "result": None}
    assert "already" in inside.start()["error"]
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


def test_worker_tells_of_a_reply_too_large(inside, monkeypatch):
    """A result that does not fit into a message becomes an error, not silence."""
    inside.start()
    monkeypatch.setattr("lifecycle.rollout.messages.LIMIT", 300)
    assert "over the limit" in inside.call("status")["error"]


def test_sent_tensor_survives_the_journey():
    """A manifest is the same after it was plain data."""
    from lifecycle.rollout.weights import manifest_from_plain

    manifest = UpdateManifest(1, (SentTensor("a", "float32", (2, 3), (3, 1), 0, 64, "0" * 16),))
    assert manifest_from_plain(manifest.to_plain()) == manifest


def test_segments_are_a_tuple():
    """The transport keeps its segments in order, whatever they came in."""
    segment = Segment(1, 5, 10)
    assert SharedMemoryTransport([segment]).segments == (segment,)
