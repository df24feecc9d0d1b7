"""What importing the library needs, and what it leaves alone."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import lifecycle
from lifecycle import Region, region
from states.actor import ACTOR

HEAVY = ("torch", "ray", "transformers", "graphviz", "hypothesis", "numpy", "rich", "typer", "psutil", "megatron")
BLOCKER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refuse())
"""


def run(code: str, blocked=HEAVY) -> subprocess.CompletedProcess:
    program = BLOCKER.format(blocked=set(blocked)) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_core_imports_without_heavy_packages():
    """states and lifecycle import with every optional package refused, and bring none of them in."""
    done = run("import states.actor, lifecycle; print(sorted(set(sys.modules) & {'torch', 'rich'}), lifecycle.State)")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[]")


def test_states_imports_nothing_of_the_core():
    """The declaration stands alone: it imports attrs and itself."""
    done = run("import states.actor; print([m for m in sys.modules if m.startswith('lifecycle')])", ())

    assert done.stdout.strip() == "[]"


def test_missing_torch_says_what_to_install():
    """An actor without torch is refused with the extra to install."""
    code = "import lifecycle\ntry:\n lifecycle.ActorLifecycle(None)\nexcept lifecycle.MissingExtra as e: print(e)"

    assert "pip install 'actor-lifecycle[torch]'" in run(code).stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_command_line_says_what_to_install(package):
    """Without typer or rich the command names the extra and exits with 2."""
    done = run("sys.argv = ['lifecycle', '--help']\nimport lifecycle.__main__\nlifecycle.__main__.main()", [package])

    assert done.returncode == 2
    assert "actor-lifecycle[cli]" in done.stderr


def test_a_benchmark_without_torch_says_what_to_install():
    """The command line is there, and what it measures is not."""
    line = "sys.argv = ['lifecycle', 'bench', 'memory', '--gib', '0.01']"
    done = run(f"{line}\nimport lifecycle.__main__\nlifecycle.__main__.main()", ["torch"])

    assert done.returncode == 2
    assert "actor-lifecycle[torch]" in done.stderr


def test_a_machine_is_short_in_signatures():
    """help(ActorLifecycle) prints its default."""
    assert repr(ACTOR) == f"<MachineSpec 'actor': {len(ACTOR.states)} states, {len(ACTOR.rows)} rows>"
    assert len(inspect.signature(lifecycle.ActorLifecycle.__init__).__str__()) < 800


def test_exported_names():
    """The public names, each really there."""
    assert all(hasattr(lifecycle, name) for name in lifecycle.__all__)
    assert {"ActorLifecycle", "LifecycleConfig", "State", "Copy", "LifecycleError", "TransitionRefused"} <= set(
        lifecycle.__all__
    )


def test_region_checks_its_name():
    """region() takes the names of regions, and no others."""
    with region("weights") as entered:
        assert entered is Region.WEIGHTS
    with pytest.raises(ValueError, match="wieghts"), region("wieghts"):
        pass


@pytest.mark.parametrize("reserve", [-1, 1.5, True, [1 << 20], None])
def test_a_reserve_is_bytes(reserve):
    """One piece, in whole bytes: of several, torch would not cut one after the other."""
    with pytest.raises(ValueError, match="once per piece"), region("weights", reserve=reserve):
        pass
