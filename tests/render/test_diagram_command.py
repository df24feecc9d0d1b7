"""``lifecycle diagram``, finding machines, and the generated files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from render_help import small_trace
from typer.testing import CliRunner

from lifecycle.cli import app
from lifecycle.load import load_machine
from lifecycle.render import generate
from lifecycle.render.command import command
from lifecycle.render.declared import declared
from lifecycle.render.reference import reference, slug
from states.actor import ACTOR

ROOT = Path(__file__).parent.parent.parent
FIRST = {"dot": "digraph", "mermaid": "---\ntitle", "markdown": "# The", "svg": "<?xml"}


def call(machine="actor", kind="dot", detail="states", highlight=None, tags=None, output=None) -> int:
    return command(machine, kind, detail, highlight, tags, output)


@pytest.mark.usefixtures("needs_dot")
@pytest.mark.parametrize("detail", ["states", "effects", "contracts"])
@pytest.mark.parametrize("kind", list(FIRST))
def test_texts_go_to_the_standard_output(capsys, kind, detail):
    """Every text format, at every detail."""
    assert call(kind=kind, detail=detail) == 0
    assert capsys.readouterr().out.startswith(FIRST[kind])


@pytest.mark.usefixtures("needs_dot")
@pytest.mark.parametrize("kind", ["png", "pdf", "svg", "dot"])
def test_files_are_written(tmp_path, kind):
    """Also those that are no text."""
    path = tmp_path / f"picture.{kind}"

    assert call(kind=kind, output=path) == 0
    assert path.stat().st_size > 1000


def test_the_command_line_draws_and_refuses():
    """The options arrive, and the exit status is the command's."""
    runner = CliRunner()

    drawn = runner.invoke(app, ["diagram", "frozen", "--format", "markdown", "--detail", "contracts"])
    assert (drawn.exit_code, drawn.output.splitlines()[0]) == (0, "# The frozen machine")
    assert runner.invoke(app, ["diagram", "nobody"]).exit_code == 2


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_no_bytes_go_to_the_terminal(capsys, kind):
    """An image that is no text needs --output, and says so."""
    assert call(kind=kind) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(declared()))
def test_declared_machines_have_names(capsys, name):
    """Each is drawn by it."""
    assert call(name) == 0
    assert f"The {name} machine" in capsys.readouterr().out


@pytest.mark.usefixtures("needs_dot")
@pytest.mark.parametrize("kind", list(FIRST))
def test_machines_that_run_together_are_drawn(capsys, kind):
    """In every format; both rules are named in each."""
    assert call("joint", kind) == 0
    out = capsys.readouterr().out
    assert "engines" in out
    assert "actor_out" in out


def test_a_trace_of_one_machine_is_not_drawn_in_the_joint_picture(capsys):
    """It says where to draw it."""
    assert call("joint", highlight=Path("trace.json")) == 2
    assert "several machines" in capsys.readouterr().err


def test_tags_are_drawn(capsys):
    """Those that were named, not those of the examples."""
    assert call(tags="teacher") == 0
    out = capsys.readouterr().out
    assert ">teacher<" in out
    assert ">old_actor<" not in out


MINE = """
from states.actor import ACTOR
from attrs import evolve
MINE = evolve(ACTOR, name="mine")
NUMBER = 3
"""


@pytest.fixture(name="mine")
def _mine(tmp_path, monkeypatch):
    (tmp_path / "my_machine.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "broken_machine.py").write_text("import not_there_at_all", encoding="utf-8")
    (tmp_path / "raising_machine.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("text", ["my_machine:MINE", "my_machine.py:MINE", "./my_machine.py:MINE"])
def test_machines_of_ones_own_are_found(capsys, text):
    """By module or by file, in the current directory."""
    assert call(text) == 0
    assert "The mine machine" in capsys.readouterr().out


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("my_machine", "write MODULE:NAME"),
        ("my_machine:", "write MODULE:NAME"),
        ("nowhere:MINE", "no module 'nowhere'"),
        ("nowhere.py:MINE", "no file nowhere.py"),
        ("my_machine:YOURS", "has no 'YOURS'; machines there: .*MINE"),
        ("my_machine:NUMBER", "is a int, not a MachineSpec"),
        ("broken_machine:MINE", "can not be imported: No module named 'not_there_at_all'"),
        ("broken_machine.py:MINE", "can not be imported"),
        ("raising_machine:MINE", "can not be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(text, said):
    """Which half of it, and what there is."""
    with pytest.raises(ValueError, match=said):
        load_machine(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"machine": "nobody"}, "no machine 'nobody': write actor"),
        ({"kind": "jpeg"}, "jpeg"),
        ({"detail": "all"}, "all"),
        ({"highlight": Path("/nowhere/trace.json")}, "nowhere"),
    ],
)
def test_errors_exit_with_2(capsys, arguments, said):
    """And say what was wrong."""
    assert call(**arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"machine": "actor"}'])
def test_a_file_that_holds_no_trace_is_refused(capsys, tmp_path, text):
    """Not JSON, or not a trace."""
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")

    assert call(highlight=path) == 2
    assert capsys.readouterr().err


def test_a_trace_is_read(capsys, tmp_path):
    """What the checker writes is drawn, with the trace's own tags."""
    step = {"event": "sleep", "tag": None, "source": "RESIDENT", "target": "ASLEEP", "outcome": "done", "effects": []}
    plain = {**small_trace("done").to_plain(), "machine": "actor", "tags": ["actor", "guide"], "steps": [step]}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(plain), encoding="utf-8")

    assert call(highlight=path) == 0
    out = capsys.readouterr().out
    assert "✗1" in out
    assert ">guide<" in out


def test_generated_files_are_what_would_be_generated():
    """diagrams/ and docs/reference/ follow from the tables."""
    assert generate.differences(ROOT) == []


@pytest.mark.usefixtures("needs_dot")
def test_everything_is_written(tmp_path, monkeypatch):
    """Into an empty folder; after that nothing differs."""
    monkeypatch.chdir(tmp_path)

    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert (tmp_path / "diagrams/joint.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_differences_are_listed(tmp_path, capsys, monkeypatch):
    """Missing, changed and left-over files, each by name; and the command that puts it right."""
    for path, text in generate.texts().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
        if path.suffix == ".dot":
            (tmp_path / path).with_suffix(".svg").touch()
    assert generate.differences(tmp_path) == []

    (tmp_path / "diagrams/actor-states.dot").write_text("", encoding="utf-8")
    (tmp_path / "diagrams/actor-states.mmd").unlink()
    (tmp_path / "diagrams/nobody-states.dot").touch()
    monkeypatch.chdir(tmp_path)

    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "diagrams/actor-states.dot differs",
        "diagrams/actor-states.mmd is missing",
        "diagrams/nobody-states.dot is of no declared machine",
        "run: python -m lifecycle.render.generate",
    ]


def test_reference_pages_name_everything():
    """Every state, row, effect and guard, and every link leads somewhere."""
    pages = reference(ACTOR)

    for page, things in {"states": ACTOR.states, "effects": ACTOR.effects, "guards": ACTOR.guards}.items():
        headings = [line[3:] for line in pages[f"{page}.md"].splitlines() if line.startswith("## ")]
        assert headings == [thing.name for thing in things]
    assert all(f'<a id="row-{number}"></a>' in pages["rows.md"] for number in range(1, len(ACTOR.rows) + 1))


def test_links_between_reference_pages_lead_somewhere():
    """Each names a page, and a heading or a row of it."""
    pages = reference(ACTOR)
    anchors = {
        page: {slug(line[3:]) for line in text.splitlines() if line.startswith("## ")}
        | set(re.findall(r'<a id="([^"]+)"', text))
        for page, text in pages.items()
    }
    links = [found for text in pages.values() for found in re.findall(r"\]\((\w+\.md)(?:#([\w-]+))?\)", text)]

    assert len(links) > 100
    assert [link for link in links if link[1] and link[1] not in anchors[link[0]]] == []


@pytest.mark.parametrize("tags", ["actor", "a,a", "1x"])
def test_bad_tags_are_refused(tags, capsys):
    assert call(tags=tags) == 2
    assert "distinct identifiers" in capsys.readouterr().err
