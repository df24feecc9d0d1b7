"""The command line, and what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lifecycle.cli import app

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m lifecycle ARGUMENTS``, in a process whose ``code`` runs first."""
    program = f"import runpy, sys\n{code}\nrunpy.run_module('lifecycle', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def blocking(*packages: str) -> str:
    """Code after which importing these fails as if they were not installed."""
    return (
        "import importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {packages!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )


def test_help_names_the_commands() -> None:
    """`python -m lifecycle --help` works and lists the commands."""
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_cli_packages_are_named(package: str) -> None:
    """Without typer or rich the command says what to install and exits with 2, without a traceback."""
    done = run("demo", "--model", "tiny", code=blocking(package))
    assert done.returncode == 2
    assert f"needs '{package}': pip install 'actor-lifecycle[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["torch", "transformers", "matplotlib"])
def test_missing_demo_packages_are_named_before_anything_begins(package: str, tmp_path: Path) -> None:
    """What the demo needs is looked for first, and named with the extra that brings it."""
    done = run("demo", "--model", "tiny", "--output", str(tmp_path), code=blocking_specs(package))
    assert done.returncode == 2
    assert f"lifecycle demo needs '{package}': pip install 'actor-lifecycle[demo]'" in done.stderr


def blocking_specs(package: str) -> str:
    """Code after which looking for the package finds nothing."""
    return (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)\n"
    )


def test_other_missing_modules_are_not_hidden() -> None:
    """A module that is missing for another reason is a traceback, not advice about extras."""
    done = run("--help", code=blocking("lifecycle.demo.options", "attrs"))
    assert done.returncode == 1
    assert "No module named 'attrs'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "huge"], "huge"),
        (["--steps", "0"], "steps"),
        (["--samples", "1"], "samples"),
        (["--lr", "0"], "lr"),
        (["--kl", "-1"], "kl"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], told: str) -> None:
    """An option that can not be used is a usage error that names it; nothing is loaded."""
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert told in done.output


def test_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """An output folder that can not be made is one line on standard error and exit status 2."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    done = run("demo", "--model", "tiny", "--output", str(taken))
    assert done.returncode == 2
    assert str(taken) in done.stderr
    assert "Traceback" not in done.stderr


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's example of embedding the controller does what its comments say."""
    found = re.search(r"<!-- example.*?-->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("RESIDENT {'actor': ")
    assert "forward refused in ASLEEP" in printed


def test_readme_names_files_that_exist() -> None:
    """Every path that the README names is there."""
    named = re.findall(r"`((?:states|lifecycle|tests|docs)/[\w./-]+)`", (ROOT / "README.md").read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert named
    assert not missing
