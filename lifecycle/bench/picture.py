"""A result as a picture: bars against the line of the limit. Needs the extra ``demo`` (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lifecycle.bench.machine import machine_in_words
from lifecycle.bench.result import Bar, Group, Result, Unit, amount, digits
from lifecycle.errors import MissingExtra

SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = {"ours": "#0072B2", "peer": "#B8B8B8", "limit": "#D55E00"}
_LINE: Any = {"color": "#D55E00", "linewidth": 1.4, "linestyle": (0, (4, 2)), "zorder": 3}
_ROW, _HEAD, _FOOT = 0.32, 0.75, 0.3  # inches: of a bar, above and below those of a group
_GREY = "#666666"  # of what explains
_LOG = 20.0  # from this ratio of longest to shortest on, lengths are logarithmic


def require(path: Path) -> None:
    """Raises ValueError for what can be no .svg or .png file, MissingExtra without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: pictures are written as {' or '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{path}: no file of this name can be written: {'it' if path.is_dir() else path.parent} is "
            f"{'a directory' if path.is_dir() else 'no directory'}"
        )
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("pictures of benchmarks", "matplotlib", "demo") from error
    matplotlib.use("Agg")


def draw(result: Result, path: Path) -> None:
    """Write it there. Raises as ``require`` does."""
    require(path)
    from matplotlib import pyplot

    heights = [_HEAD + _FOOT + _ROW * len(group.bars) for group in result.groups]
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "bench", "svg.fonttype": "path"}):
        figure, panels = pyplot.subplots(
            len(heights),
            1,
            figsize=(9.5, sum(heights) + 0.4),
            layout="constrained",
            height_ratios=heights,
            squeeze=False,
        )
        title = f"lifecycle bench {result.bench}: {machine_in_words(dict(result.machine))}"
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        for axes, group in zip(panels[:, 0], result.groups, strict=True):
            _draw_group(axes, group)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw_group(axes: Any, group: Group) -> None:
    rows = range(len(group.bars))
    values = [bar.value for bar in group.bars]
    axes.barh(rows, values, height=0.68, color=[_COLOURS[bar.role] for bar in group.bars], zorder=2)
    axes.set_yticks(rows, [bar.name for bar in group.bars])
    axes.invert_yaxis()
    axes.set_title(group.title, loc="left", fontsize=9.5, fontweight="bold", pad=16)
    start, end = _scale(axes, values if group.limit is None else [*values, group.limit])
    for row, bar in zip(rows, group.bars, strict=True):
        _write(axes, row, bar, group)
    if group.limit is not None:
        _draw_limit(axes, group, start, end)
    _mark_decades(axes, group.unit, start, end)
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _write(axes: Any, row: int, bar: Bar, group: Group) -> None:
    place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "ha": "left"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the limit's line
    axes.annotate(_label(bar, group), (bar.value, row), **place, fontsize=8, zorder=4, bbox=box)


def _label(bar: Bar, group: Group) -> str:
    times = f"  ({digits(bar.value / group.limit)} × limit)" if group.limit else ""
    return amount(bar.value, group.unit) + times + (f", {bar.note}" if bar.note else "")


def _draw_limit(axes: Any, group: Group, start: float, end: float) -> None:
    assert group.limit is not None
    axes.axvline(group.limit, **_LINE)
    right = _share(axes, group.limit, start, end) > 0.55
    text = f"limit: {group.limit_name}, {amount(group.limit, group.unit)}"
    place = (group.limit, 1.0)
    axes.annotate(
        text + ("  " if right else ""),
        place,
        xytext=(0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8,
        color=_COLOURS["limit"],
    )


def _scale(axes: Any, values: Sequence[float]) -> tuple[float, float]:
    """Room for the text beside the longest bar; logarithmic where the shortest would not be seen. Returns the ends."""
    least, most = min(value for value in values if value > 0), max(values)
    if most / least > _LOG:
        axes.set_xscale("log")
        start = least / 3
        end = start * (most / start) ** 1.45
        axes.set_xlabel("logarithmic", loc="right", fontsize=7.5, color=_GREY)
    else:
        start, end = 0.0, most * 1.45
    axes.set_xlim(start, end)
    return start, end


def _mark_decades(axes: Any, unit: Unit, start: float, end: float) -> None:
    """Where lengths are logarithmic; elsewhere the numbers beside the bars say enough."""
    decades = []
    if axes.get_xscale() == "log":
        decades = [10.0**power for power in range(math.ceil(math.log10(start)), math.floor(math.log10(end)) + 1)]
        axes.grid(axis="x", color="#E2E2E2", linewidth=0.7, zorder=0)
        axes.set_axisbelow(True)
    labels = [amount(value, unit) for value in decades]
    axes.set_xticks(decades, labels, fontsize=7.5, color=_GREY)


def _share(axes: Any, value: float, start: float, end: float) -> float:
    """Where the value is between the ends, 0 to 1."""
    if axes.get_xscale() == "log":
        return math.log(value / start) / math.log(end / start)
    return (value - start) / (end - start)
