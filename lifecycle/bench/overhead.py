"""What the controller costs where no byte has to move: a switch there and back between two tags of one version.

Beside it, in turn, the same two triggers on a bare ``transitions.Machine`` with two states and no callbacks.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from lifecycle.config import LifecycleConfig
from lifecycle.controller import ActorLifecycle
from lifecycle.errors import MissingExtra

_WARMUP = 200


@frozen
class Spread:
    """Microseconds of a round trip."""

    median: float
    p10: float
    p90: float


@frozen
class Overhead:
    """The result: both round trips, their ratio, and what was measured on what."""

    ours_us: Spread
    bare_us: Spread
    ratio: float
    rounds: int
    tensors: int
    model_bytes: int
    journal_records: int
    verify: str
    bytes_moved: int
    python: str
    transitions: str
    torch: str

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def measure(rounds: int = 3000) -> Overhead:
    """Time ``rounds`` pairs of round trips, alternating which goes first.

    The actor has SmolLM2-135M's manifest (272 named parameters, random values), journals to disk and verifies always.
    """
    import torch
    import transitions

    with tempfile.TemporaryDirectory() as folder:
        config = LifecycleConfig(journal=Path(folder) / "journal.jsonl", verify="always")
        with ActorLifecycle(_smollm2(), tags=("ref",), config=config) as actor:
            ours, bare = _interleaved(rounds, _switch_and_back(actor), _bare_machine())
            manifest = actor.manifest
            return Overhead(
                ours_us=_spread(ours),
                bare_us=_spread(bare),
                ratio=statistics.median(ours) / statistics.median(bare),
                rounds=rounds,
                tensors=sum(len(layout.tensors) for layout in manifest.layouts.values()),
                model_bytes=manifest.nbytes,
                journal_records=len(actor.journal),
                verify=actor.config.verify,
                bytes_moved=actor.traffic.device_to_host + actor.traffic.host_to_device,
                python=platform.python_version(),
                transitions=transitions.__version__,
                torch=torch.__version__,
            )


def _smollm2() -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra("lifecycle bench overhead", "transformers", "rollout") from error
    config = AutoConfig.for_model(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _switch_and_back(actor: ActorLifecycle) -> Callable[[], None]:
    def there_and_back() -> None:
        actor.switch("ref")
        actor.switch("actor")

    return there_and_back


def _bare_machine() -> Callable[[], None]:
    from lifecycle.machine import bare

    holder = bare(["RESIDENT", "SWITCHED"], [("switch", "RESIDENT", "SWITCHED"), ("back", "SWITCHED", "RESIDENT")])

    def there_and_back() -> None:
        holder.switch()
        holder.back()

    return there_and_back


def _interleaved(rounds: int, one: Callable[[], None], other: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Microseconds of each round, after a warm-up."""
    for _ in range(_WARMUP):
        one()
        other()
    first, second = [], []
    for number in range(rounds):
        if number % 2:
            first.append(_timed(one))
            second.append(_timed(other))
        else:
            second.append(_timed(other))
            first.append(_timed(one))
    return first, second


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3


def _spread(values: list[float]) -> Spread:
    cuts = statistics.quantiles(values, n=10)
    return Spread(statistics.median(values), cuts[0], cuts[-1])
