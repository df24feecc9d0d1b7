"""Spin, which shares nothing with our exploration but the grounded machine, comes to the same."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
from attrs import evolve

from lifecycle.checker import spin
from lifecycle.checker.declared import models
from lifecycle.checker.explore import explore
from lifecycle.checker.formula import FALSE, Bit, all_of, any_of
from lifecycle.checker.ground import ground
from lifecycle.checker.promela import NOT_EXPRESSIBLE, assignments, expression, fact, names_asked, promela
from lifecycle.checker.small_steps import count
from lifecycle.checker.spin import SpinFailed, SpinMissing, run_spin
from lifecycle.checker.spin_command import compared, main, markdown, show_spin, to_plain
from lifecycle.checker.words import Instance

needs_spin = pytest.mark.skipif(spin.missing() is not None, reason=str(spin.missing()))

MACHINES = sorted(path.stem for path in (Path(__file__).parent / "machines").glob("[!_]*.py"))


def _kept(name):
    return import_module(f"tests.checker.machines.{name}")


def _actor(tags, engines, slots):
    return evolve(models()["actor"], instance=Instance(tags=tags, engines=engines, slots=slots))


ONE, TWO = ("trained",), ("frozen", "trained")
SMALL = _actor((), ("a",), ONE)


# the text


def test_text_is_the_same_each_time():
    """Two exports of one machine are equal, so they can be compared and kept."""
    assert promela(ground(SMALL)) == promela(ground(SMALL))


def test_text_asks_for_what_was_named():
    """An export for one invariant asserts that one alone; one for all asserts each."""
    program = ground(SMALL)

    assert promela(program, "alternation").count("assert(") == 1
    assert promela(program).count("assert(") == len(names_asked(program))


def test_every_fact_has_a_variable_of_its_own():
    """Names that differ in punctuation alone stay apart."""
    names = ["a.b", "a_b", "a b", "a-b", "a95b", "a.95.b", "a._b", "a_.b"]

    assert len({fact(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["way_home", "nonsense"])
def test_what_can_not_be_asked_is_refused(name):
    """The message says whether Spin can not say it or nobody knows it."""
    with pytest.raises(ValueError, match="not express" if name in NOT_EXPRESSIBLE else "there are version_has_copy"):
        promela(ground(SMALL), name)


def test_assignments_are_made_at_once():
    """What a formula reads is what was true before, even where it is assigned, too."""
    assert assignments([("a", Bit("b")), ("b", Bit("a")), ("c", FALSE), ("d", Bit("d"))]) == [
        "t0 = f_b",
        "t1 = f_a",
        "f_a = t0",
        "f_b = t1",
        "f_c = false",
    ]


def test_contrary_facts_are_false():
    """A fact and its negation are never both true: Spin found them taken for the fact alone."""
    one, other = Bit("a"), Bit("b")

    assert all_of([~one, other, one]) == FALSE
    assert expression(any_of([~one, other, one])) == "true"


# the same states and the same verdict


@needs_spin
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(SMALL, id="actor-1-tag-1-slot"),
        pytest.param(_actor((), ("a",), TWO), id="actor-1-tag-2-slots", marks=pytest.mark.slow),
        pytest.param(models()["frozen"], id="frozen"),
        pytest.param(models()["rollout"], id="rollout"),
    ],
)
def test_every_state_is_found_by_both(model):
    """As many resting states as the exploration finds, and as many moments of events as single steps reach."""
    program = ground(model)
    verdict, steps = run_spin(program), count(program)

    assert verdict.broken is None
    assert (verdict.resting, verdict.states) == (steps.resting, steps.states)
    assert verdict.resting == len(explore(program).parents)


@needs_spin
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(_actor(("ref",), ("a",), ONE), id="2-tags-1-slot", marks=pytest.mark.slow),
        pytest.param(_actor(("ref",), ("a",), TWO), id="2-tags-2-slots", marks=pytest.mark.slow),
        pytest.param(_actor((), (), ONE), id="no-engine-1-slot"),
        pytest.param(_actor(("ref",), (), TWO), id="no-engine-2-tags-2-slots", marks=pytest.mark.slow),
    ],
)
def test_larger_instances_agree(model):
    """Resting states and verdict are the same where single steps are too many to count here."""
    assert compared("actor", model, steps_counted_to=0).agree


def _once_per_invariant():
    """The first machine of each invariant in the normal run, the others in the slow one."""
    seen = set()
    for name in MACHINES:
        invariant = getattr(_kept(name), "INVARIANT", None)
        if invariant is not None:
            yield pytest.param(name, marks=[pytest.mark.slow] if invariant in seen else [])
            seen.add(invariant)


@needs_spin
@pytest.mark.parametrize("name", list(_once_per_invariant()))
def test_broken_machines_are_broken_for_both(name):
    """Spin, asked for the invariant alone, finds it broken; where it can not be asked, it counts the same states."""
    kept = _kept(name)
    row = compared(name, kept.MACHINE, steps_counted_to=0)

    assert row.agree
    assert row.ours == kept.INVARIANT
    assert row.spin == ("not expressible" if kept.INVARIANT in NOT_EXPRESSIBLE else kept.INVARIANT)


@needs_spin
def test_missing_fault_is_found_by_both():
    """A failure that can not be unwound has to lead somewhere."""
    program = ground(SMALL)
    program = evolve(program, faults={source: to for source, to in program.faults.items() if source != "RESIDENT"})

    assert set(explore(program).broken) == {"fault_is_declared"}
    assert run_spin(program, "fault_is_declared").broken == "fault_is_declared"


@needs_spin
def test_invariants_of_a_machine_of_its_own_are_asked():
    """An engine that keeps its version while its memory is given back breaks what its own machine promises."""
    forgetful = {name: lambda asked: () for name in ("release_weights", "drop_version")}
    program = ground(evolve(models()["rollout"], meanings=forgetful))

    assert run_spin(program, "version_needs_weights").broken == "version_needs_weights"
    assert run_spin(program, "alternation").broken is None


# the program around it


@needs_spin
def test_table_names_machine_and_counts(tmp_path, monkeypatch, capsys):
    """The rows go to a file, the table to the standard output, and agreement is success."""
    rollout = {"rollout": models()["rollout"]}
    monkeypatch.setattr("lifecycle.checker.spin_command.own_models", lambda: rollout)

    assert main(["--markdown", "--json", str(tmp_path / "rows.json")]) == 0
    assert "| rollout |" in capsys.readouterr().out
    assert '"resting_spin"' in (tmp_path / "rows.json").read_text(encoding="utf-8")


@needs_spin
def test_disagreement_is_seen(capsys):
    """A count that differs is shown as such."""
    row = evolve(compared("rollout", models()["rollout"]), agree=False)

    assert "NO" in "\n".join(markdown([row]))
    assert to_plain([row])["rows"][0]["agree"] is False

    show_spin([row])

    assert "NO" in capsys.readouterr().out


@needs_spin
def test_no_verdict_without_time():
    """A search that is not done in time is an error and no verdict."""
    with pytest.raises(SpinFailed, match="not done in time"):
        run_spin(ground(SMALL), timeout=0.0)


@pytest.mark.parametrize("program", ["spin", "cc"])
def test_missing_program_is_named(monkeypatch, program):
    """The message names the package to install."""
    real = shutil.which
    absent = {"spin"} if program == "spin" else {"cc", "gcc"}
    monkeypatch.setattr(shutil, "which", lambda name: None if name in absent else real(name) or f"/bin/{name}")

    with pytest.raises(SpinMissing, match="apt install"):
        run_spin(ground(models()["rollout"]))
