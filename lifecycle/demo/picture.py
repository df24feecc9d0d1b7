"""One picture of a run: states of both processes over time, above the memory of both over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import frozen

from lifecycle.demo.observe import Sample
from lifecycle.journal import Record

# Okabe and Ito's colours, which stay apart for colour-blind readers; lines and marks also differ in shape.
_BLUE, _SKY, _GREEN, _YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
_ORANGE, _VERMILION, _PURPLE = "#E69F00", "#D55E00", "#CC79A7"
_PALE, _WHITE, _MINT = "#E8E8E8", "#FFFFFF", "#A6DCC9"

_EDGE: Any = {"edgecolor": "#444444", "linewidth": 0.3}
_MARK: Any = {
    "linestyle": "none",
    "color": "#222222",
    "markersize": 4,
    "markerfacecolor": _WHITE,
    "zorder": 3,
    "clip_on": False,
}

_LINES = (
    ("trainer, anonymous", "trainer_bytes", _BLUE, "-"),
    ("engine, anonymous", "engine_bytes", _VERMILION, "--"),
    ("host copies, shared", "host_bytes", _GREEN, ":"),
)
_MARKS = (("wake_up", "wake_up", "^"), ("switch", "switch", "D"), ("start_sync", "sync", "s"), ("sleep", "sleep", "v"))


@frozen
class Look:
    """How a state is drawn."""

    label: str
    colour: str
    hatch: str = ""


TRAINING = "TRAINING"
_TRAINER = {
    "RESIDENT": Look("RESIDENT", _SKY),
    TRAINING: Look("RESIDENT, training", _BLUE),
    "SWITCHED": Look("SWITCHED(ref)", _ORANGE),
    "SYNCING": Look("SYNCING", _YELLOW, "///"),
    "ASLEEP": Look("ASLEEP", _PALE),
}
_ENGINE = {
    "generating": Look("generating", _GREEN),
    "ready": Look("ready", _MINT),
    "waiting": Look("waiting", _PURPLE),
    "updating": Look("taking weights", _YELLOW, "///"),
    "empty": Look("no version", _WHITE),
    "released": Look("released", _PALE),
}


@frozen
class Band:
    """A state that lasted, in seconds since the beginning of the picture."""

    state: str
    start: float
    end: float


def trainer_bands(records: Iterable[Record], zero: float, end: float) -> list[Band]:
    """From the journal: committed states, RESIDENT divided by its training phases."""
    changes = [(record.time - zero, _state_after(record)) for record in records if record.kind in ("attach", "commit")]
    return _merged(changes, end)


def _state_after(record: Record) -> str:
    if record.event == "begin_training":
        return TRAINING
    return (record.target or "").split("(")[0].split("_")[0]


def engine_bands(samples: Sequence[Sample], zero: float, end: float) -> list[Band]:
    """From samples: a state lasts until another one is seen."""
    return _merged([(sample.time - zero, sample.engine) for sample in samples], end)


def _merged(changes: Sequence[tuple[float, str]], end: float) -> list[Band]:
    bands: list[Band] = []
    for (start, state), (until, _) in pairwise([*changes, (end, "")]):
        if bands and bands[-1].state == state:
            bands[-1] = Band(state, bands[-1].start, until)
        else:
            bands.append(Band(state, start, until))
    return bands


def draw(samples: Sequence[Sample], records: Sequence[Record], title: str, path: Path) -> tuple[Path, ...]:
    """Write ``path`` with .png and .svg; returns both. Needs at least two samples, and the record of attaching."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    zero = records[0].time
    end = max(samples[-1].time, records[-1].time) - zero
    trainer, engine = trainer_bands(records, zero, end), engine_bands(samples, zero, end)
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "timeline", "hatch.linewidth": 0.6}):
        figure, (states, memory) = pyplot.subplots(
            2, 1, sharex=True, figsize=(9.5, 5), layout="constrained", height_ratios=(1, 2.2)
        )
        figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        _draw_states(states, trainer, engine)
        _draw_memory(memory, samples, zero)
        _draw_events(memory, samples, records, zero)
        _draw_steps((states, memory), records, zero)
        memory.set_xlim(0, end)
        _draw_legend(figure, memory, trainer, engine)
        files = (path.with_suffix(".png"), path.with_suffix(".svg"))
        for file in files:
            figure.savefig(file, dpi=200)
        pyplot.close(figure)
    return files


def _draw_states(axes: Any, trainer: Sequence[Band], engine: Sequence[Band]) -> None:
    for row, bands, looks in ((1, trainer, _TRAINER), (0, engine, _ENGINE)):
        for band in bands:
            look = looks.get(band.state)
            if look is not None:
                extent = [(band.start, band.end - band.start)]
                axes.broken_barh(extent, (row - 0.36, 0.72), facecolor=look.colour, hatch=look.hatch, **_EDGE)
    axes.set_yticks((0, 1), ("engine", "trainer"))
    axes.set_ylim(-0.5, 1.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_memory(axes: Any, samples: Sequence[Sample], zero: float) -> None:
    times = [sample.time - zero for sample in samples]
    unit, divisor = _unit(samples)
    for label, attribute, colour, style in _LINES:
        values = [getattr(sample, attribute) / divisor for sample in samples]
        axes.plot(times, values, style, color=colour, linewidth=1.4, label=label)
    axes.set_ylabel(f"resident memory ({unit})")
    axes.set_xlabel("time since the trainer was attached (s)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(samples: Iterable[Sample]) -> tuple[str, int]:
    largest = max(max(sample.trainer_bytes, sample.engine_bytes, sample.host_bytes) for sample in samples)
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def _draw_events(axes: Any, samples: Sequence[Sample], records: Iterable[Record], zero: float) -> None:
    """On the trainer's line, at the moment each event began."""
    _, divisor = _unit(samples)
    began = [(r.event, r.time - r.seconds - zero) for r in records if r.kind == "commit"]
    for event, label, marker in _MARKS:
        times = [moment for name, moment in began if name == event]
        heights = [_bytes_at(samples, moment + zero) / divisor for moment in times]
        axes.plot(times, heights, marker, **_MARK, label=label)


def _bytes_at(samples: Sequence[Sample], moment: float) -> int:
    """The trainer's, in the last sample before."""
    before = [sample for sample in samples if sample.time <= moment]
    return (before[-1] if before else samples[0]).trainer_bytes


def _draw_steps(panels: Sequence[Any], records: Iterable[Record], zero: float) -> None:
    """A thin line where each step begins, which is where the last one fell asleep, and its number."""
    sleeps = [record.time - zero for record in records if record.kind == "commit" and record.event == "sleep"]
    for moment in sleeps:
        for axes in panels:
            axes.axvline(moment, color="#888888", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
    every = 1 + len(sleeps) // 12  # more numbers would not fit
    for number, (start, end) in enumerate(pairwise(sleeps[:-1]), start=1):
        if number % every == 0:
            panels[0].text((start + end) / 2, 1.42, f"step {number}", ha="center", va="bottom", fontsize=8)


def _draw_legend(figure: Any, memory: Any, trainer: Sequence[Band], engine: Sequence[Band]) -> None:
    """One column beside the data, in four groups."""
    lines, _ = memory.get_legend_handles_labels()
    groups = (
        ("trainer", _patches(trainer, _TRAINER)),
        ("engine", _patches(engine, _ENGINE)),
        ("resident memory", lines[: len(_LINES)]),
        ("the trainer's events", lines[len(_LINES) :]),
    )
    handles = [handle for title, members in groups for handle in (_heading(title), *members)]
    legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8, labelspacing=0.55)
    headings = {title for title, _ in groups}
    for text in legend.get_texts():
        if text.get_text() in headings:
            text.set_weight("bold")


def _heading(title: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", label=title)


def _patches(bands: Iterable[Band], looks: Mapping[str, Look]) -> list[Any]:
    """Of the states that occur, in the order of the looks."""
    from matplotlib.patches import Patch

    seen = {band.state for band in bands}
    return [
        Patch(facecolor=look.colour, hatch=look.hatch, label=look.label, **_EDGE)
        for state, look in looks.items()
        if state in seen
    ]
