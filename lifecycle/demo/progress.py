"""What the demo is doing now and has done so far: written by the job, read by whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from attrs import define, field, frozen

from lifecycle.controller import ActorLifecycle
from lifecycle.demo.observe import Sample
from lifecycle.demo.options import DemoOptions


@frozen
class StepFigures:
    """One step's results; the first is number 1.

    Rewards and correct answers are means over its samples; ``kl`` is per token, in nats.
    """

    number: int
    version: int
    reward: float
    correct: float
    kl: float
    loss: float
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    memory: Mapping[str, int]
    example: str


class View(Protocol):
    """Shows progress to a person. Told of every change, from the job's thread."""

    def phase(self, what: str) -> None: ...

    def step(self, figures: StepFigures) -> None: ...


@define
class Progress:
    """The state of the job. ``actor`` and ``samples`` are there once training begins."""

    options: DemoOptions
    view: View
    began: float = field(factory=time.monotonic)
    now: str = ""
    since: float = field(factory=time.monotonic)
    done: list[tuple[str, float]] = field(factory=list)
    steps: list[StepFigures] = field(factory=list)
    actor: ActorLifecycle | None = None
    samples: list[Sample] = field(factory=list)
    title: str = ""

    @contextmanager
    def phase(self, what: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Something that takes a while; its seconds are written into ``seconds`` by its name."""
        self.now, self.since = what, time.monotonic()
        self.view.phase(what)
        yield
        taken = time.monotonic() - self.since
        self.done.append((what, taken))
        if seconds is not None:
            seconds[what] = taken

    def add(self, figures: StepFigures) -> None:
        self.steps.append(figures)
        self.view.step(figures)
