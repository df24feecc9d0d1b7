"""The engine ``local``: what it generates, how it pauses, and how it dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
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
from transformers import AutoModelForCausalLM

from lifecycle.errors import EngineError
from lifecycle.testing.engine_contract import shared_memory_update, take

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


# Life and death


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_copy_is_refused(process):
    """A forked child can not use the engine, and neither using nor closing its copy harms the parent's."""
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
