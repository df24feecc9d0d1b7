"""The commands that need no model: plan and bench, in this process."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from lifecycle.bench import overhead
from lifecycle.cli import app
from lifecycle.describe import describe
from states.actor import ACTOR


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_plan_shows_the_effects_in_the_tables_order():
    """`plan` prints each effect of the row, what it does and how it is undone."""
    done = run("plan", "wake_up", "--from", "ASLEEP", "--tag", "ref", "--json")
    (found,) = json.loads(done.stdout)

    assert done.exit_code == 0
    assert (found["source"], found["target"]) == ("ASLEEP", "SWITCHED(ref)")
    row = next(r for r in ACTOR.rows if (r.event, r.target) == ("wake_up", "SWITCHED"))
    assert tuple(effect["name"] for effect in found["effects"]) == row.effects


def test_plan_as_a_table():
    """Without --json there is a table with points of no return marked."""
    done = run("plan", "sleep", "--from", "SWITCHED(ref)")

    assert done.exit_code == 0
    assert "point of no return" in done.stdout
    assert "pause_regions" in done.stdout


def test_plan_lists_every_row_that_facts_choose_between():
    """Where facts decide, every row is shown: recover ends awake or asleep."""
    assert {one.target for one in describe(ACTOR, "recover", "FAULTED", None, ["ref"])} == {"RESIDENT", "ASLEEP"}


def test_plan_of_a_refused_event_exits_with_1():
    """A refusal says what to do instead, and the exit status is a finding."""
    done = run("plan", "switch", "--from", "ASLEEP", "--tag", "ref")

    assert done.exit_code == 1
    assert "goes straight there" in done.stdout


def test_plan_takes_the_actors_tag_where_none_is_given():
    """wake_up without a tag is wake_up of the actor."""
    assert describe(ACTOR, "wake_up", "ASLEEP", None, ["ref"])[0].target == "RESIDENT"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", "slep", "--from", "ASLEEP"), "unknown event 'slep'"),
        (("plan", "sleep", "--from", "AWAY"), "unknown state 'AWAY'"),
        (("plan", "switch", "--from", "RESIDENT", "--tag", "rfe"), "unknown tag 'rfe'"),
    ],
)
def test_plan_names_what_it_does_not_know(arguments, told):
    """A misspelt word is an error that names the known ones."""
    done = run(*arguments)

    assert done.exit_code == 2
    assert told in done.output.replace("│", "").replace("\n", " ")


def test_overhead_moves_no_byte():
    """The benchmark measures what it says: SmolLM2's manifest, journal on, checks on, not a byte moved."""
    done = run("bench", "overhead", "--rounds", "20", "--json")
    result = json.loads(done.stdout)

    assert done.exit_code == 0
    assert result["bytes_moved"] == 0
    assert result["verify"] == "always"
    assert result["tensors"] >= 272
    assert result["journal_records"] > 2 * 20
    assert result["ratio"] == pytest.approx(result["ours_us"]["median"] / result["bare_us"]["median"])


def test_overhead_for_a_person(monkeypatch):
    """Without --json the two medians and their ratio are printed."""
    spread = overhead.Spread(100.0, 90.0, 110.0)
    result = overhead.Overhead(spread, overhead.Spread(20.0, 18.0, 22.0), 5.0, 10, 1, 1, 1, "always", 0, "", "", "")
    monkeypatch.setattr(overhead, "measure", lambda rounds: result)
    done = run("bench", "overhead", "--rounds", "10")

    assert "ratio 5.00 over 10 interleaved rounds" in done.stdout


def test_overhead_needs_transformers(monkeypatch):
    """Without transformers the benchmark names the extra."""
    from lifecycle import MissingExtra

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"actor-lifecycle\[rollout\]"):
        overhead.measure(10)


def test_errors_of_the_library_exit_with_2(monkeypatch, capsys):
    """`python -m lifecycle` prints an error of ours as one line."""
    from lifecycle import LifecycleError
    from lifecycle.__main__ import main

    def refuse(**_):
        raise LifecycleError("what was asked, and what to do")

    monkeypatch.setattr("lifecycle.cli.app", refuse)
    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert "what to do" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "error"), [("typer", SystemExit), ("colorama", ModuleNotFoundError)])
def test_missing_packages(monkeypatch, missing, error):
    """A missing package of the command line is named; any other missing module is not hidden."""
    from lifecycle.__main__ import main

    def refuse(**_):
        raise ModuleNotFoundError(missing, name=missing)

    monkeypatch.setattr("lifecycle.cli.app", refuse)
    with pytest.raises(error):
        main()
