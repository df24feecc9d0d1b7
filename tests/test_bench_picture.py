"""Pictures of results: bars as long as they should be, the limit where it is, every number beside its bar."""

from __future__ import annotations

import json
import sys

import pytest
from matplotlib import pyplot
from typer.testing import CliRunner

from lifecycle import MissingExtra
from lifecycle.bench.picture import _draw_group, draw
from lifecycle.bench.result import Bar, Group, Result, amount
from lifecycle.cli import app

MACHINE = {"gpu": None, "cores": 2, "torch": "2", "date": "2026-01-02T03:04:05+00:00"}


def result(group: Group) -> Result:
    return Result("switch", MACHINE, {}, (group,))


def group(*values: float, limit: float | None = 0.19) -> Group:
    bars = [
        Bar(f"bar {n}", "peer" if n else "ours", [value], "one round" if n else "") for n, value in enumerate(values)
    ]
    return Group("a switch", "s", bars, limit, "both at once")


@pytest.fixture(name="axes")
def _axes():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def test_bars_are_as_long_as_their_medians(axes):
    """With their numbers, in multiples of the limit, and the limit's line at its place."""
    _draw_group(axes, group(0.2, 0.38))

    assert [bar.get_width() for bar in axes.patches] == [0.2, 0.38]
    assert axes.get_xscale() == "linear"
    assert len(axes.get_xticks()) == 0
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["200 ms  (1.05 × limit)", "380 ms  (2.00 × limit), one round", "limit: both at once, 190 ms"]
    (line,) = axes.lines
    assert list(line.get_xdata()) == [0.19, 0.19]


def test_lengths_are_logarithmic_where_the_shortest_would_vanish(axes):
    """And that is said."""
    _draw_group(axes, group(0.01, 6.4))

    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "logarithmic"
    start, end = axes.get_xlim()
    assert start < 0.01
    assert end > 6.4
    assert list(axes.get_xticks()) == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10.0 ms", "100 ms", "1.00 s", "10.0 s", "100 s"]


def test_without_a_limit_there_is_no_line(axes):
    _draw_group(axes, group(0.2, 0.3, limit=None))

    assert len(axes.lines) == 0
    assert [text.get_text() for text in axes.texts] == ["200 ms", "300 ms, one round"]


def test_a_limit_at_the_right_has_its_words_at_its_left(axes):
    """Or they would leave the picture."""
    _draw_group(axes, group(0.2, limit=0.3))

    assert axes.texts[-1].get_ha() == "right"


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_document_is_drawn_later(tmp_path, suffix, magic):
    """`draw` makes the picture of what --json printed elsewhere."""
    document, picture = tmp_path / "switch.json", tmp_path / f"switch{suffix}"
    document.write_text(json.dumps(result(group(0.2, 0.38)).to_plain()))
    done = CliRunner().invoke(app, ["bench", "draw", str(document), "--picture", str(picture)])

    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(magic)


def test_a_document_is_drawn_beside_itself(tmp_path):
    """Where no place is given; the command prints where it is, and is the picture that it would be elsewhere."""
    document, elsewhere = tmp_path / "switch.json", tmp_path / "elsewhere.svg"
    shown = result(group(0.2, 0.38))
    document.write_text(json.dumps(shown.to_plain()))
    done = CliRunner().invoke(app, ["bench", "draw", str(document)])
    draw(shown, elsewhere)

    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'switch.svg'}\n"
    assert (tmp_path / "switch.svg").read_bytes() == elsewhere.read_bytes()


def test_a_picture_is_the_same_each_time(tmp_path):
    """Nothing random and no date is in it."""
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    draw(result(group(0.2, 0.38)), one)
    draw(result(group(0.2, 0.38)), other)

    assert one.read_bytes() == other.read_bytes()


def test_a_command_draws_what_it_measured(tmp_path):
    picture = tmp_path / "memory.png"
    done = CliRunner().invoke(
        app, ["bench", "memory", "--gib", "0.001", "--rounds", "1", "--rest", "0", "--picture", str(picture), "--json"]
    )

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bench"] == "memory"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [("memory",), ("overhead",)])
def test_another_suffix_is_refused_before_anything_is_measured(command, monkeypatch):
    monkeypatch.setattr(f"lifecycle.bench.{command[0]}.measure", lambda *_: pytest.fail("measured"))
    done = CliRunner().invoke(app, ["bench", *command, "--picture", "x.gif"])

    assert done.exit_code == 2
    assert "x.gif" in done.output


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingExtra, match=r"actor-lifecycle\[demo\]"):
        draw(result(group(0.2)), tmp_path / "x.svg")


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (0.00123, "s", "1.23 ms"),
        (0.0123, "s", "12.3 ms"),
        (0.1234, "s", "123 ms"),
        (3.8, "s", "3.80 s"),
        (2**20 * 1.5, "B", "1.50 MiB"),
        (2**30 * 2, "B", "2.000 GiB"),
    ],
)
def test_amounts_have_three_digits(value, unit, told):
    assert amount(value, unit) == told
