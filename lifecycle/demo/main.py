"""One run of the demo from beginning to end: load, train, check, write the files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from lifecycle.demo.checks import Check
from lifecycle.demo.models import LanguageModel, load
from lifecycle.demo.observe import Sample
from lifecycle.demo.options import DemoOptions
from lifecycle.demo.progress import Progress, StepFigures
from lifecycle.errors import LifecycleError
from lifecycle.journal import Record


@frozen(eq=False)
class Result:
    """All that a run leaves behind. Times of samples and records are seconds since the epoch."""

    options: DemoOptions
    model: str
    parameters: int
    task: str
    settings: dict[str, float]
    steps: tuple[StepFigures, ...]
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    records: tuple[Record, ...]
    phases: tuple[tuple[str, float], ...]
    seconds: float
    files: dict[str, str]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def run(options: DemoOptions, progress: Progress) -> Result:
    """Raises LifecycleError for what can not be done here."""
    folder = options.output
    journal = folder / "journal.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        journal.unlink(missing_ok=True)  # a journal is appended to, and this is another run
    except OSError as error:
        raise LifecycleError(f"lifecycle demo: --output {folder}: {error}") from error
    with progress.phase("load the model"):
        language = load(options.model, options.seed)
        progress.title = language.name
    checks, records = _train(options, language, journal, progress)
    with progress.phase("draw"):
        files = _draw(folder, progress, records)
    return _result(progress, language, checks, records, {"journal": str(journal), **files})


def _train(
    options: DemoOptions, language: LanguageModel, journal: Path, progress: Progress
) -> tuple[tuple[Check, ...], tuple[Record, ...]]:
    import torch

    from lifecycle.config import LifecycleConfig
    from lifecycle.controller import ActorLifecycle
    from lifecycle.demo import loop
    from lifecycle.demo.observe import Recorder
    from lifecycle.rollout.local import LocalEngine

    torch.manual_seed(options.seed)
    optimizer = torch.optim.AdamW(language.model.parameters(), lr=options.lr or language.lr)
    with ExitStack() as stack:
        with progress.phase("start the engine"):
            threads = torch.get_num_threads()  # the same here and there: other sums would be other numbers
            engine = stack.enter_context(LocalEngine(language.model.config, threads=threads, seed=options.seed))
        with progress.phase("attach"):
            config = LifecycleConfig(journal=journal)
            actor = ActorLifecycle(language.model, optimizer, tags=("ref",), host="shared", config=config)
            stack.enter_context(actor)
        recorder = stack.enter_context(Recorder(actor, engine))
        progress.actor, progress.samples = actor, recorder.samples
        probe = language.encode(language.task.probe())
        checks = loop.run(loop.Job(options, language, optimizer, actor, engine, progress, probe))
        return checks, tuple(actor.journal)


def _draw(folder: Path, progress: Progress, records: tuple[Record, ...]) -> dict[str, str]:
    from lifecycle.demo.picture import draw

    title = f"{progress.title}: {progress.options.steps} steps of policy gradient"
    return {path.suffix[1:]: str(path) for path in draw(progress.samples, records, title, folder / "timeline")}


def _result(
    progress: Progress,
    language: LanguageModel,
    checks: tuple[Check, ...],
    records: tuple[Record, ...],
    files: dict[str, str],
) -> Result:
    options = progress.options
    return Result(
        options=options,
        model=language.name,
        parameters=sum(weight.numel() for weight in language.model.parameters()),
        task=language.task.description,
        settings={"lr": options.lr or language.lr, "temperature": language.temperature},
        steps=tuple(progress.steps),
        checks=checks,
        samples=tuple(progress.samples),
        records=records,
        phases=tuple(progress.done),
        seconds=time.monotonic() - progress.began,
        files=files,
    )


def document(result: Result) -> dict[str, Any]:
    """The result as one JSON document."""
    samples = result.samples
    return {
        "passed": result.passed,
        "config": {
            **result.options.to_plain(),
            **result.settings,
            "model_name": result.model,
            "parameters": result.parameters,
            "task": result.task,
        },
        "seconds": result.seconds,
        "phases": [{"name": name, "seconds": seconds} for name, seconds in result.phases],
        "steps": [asdict(figures) for figures in result.steps],
        "memory": {
            **result.steps[-1].memory,
            "trainer_peak": max((sample.trainer_bytes for sample in samples), default=0),
            "engine_peak": max((sample.engine_bytes for sample in samples), default=0),
            "host_copies": max((sample.host_bytes for sample in samples), default=0),
        },
        "checks": [asdict(check) for check in result.checks],
        "files": result.files,
    }
