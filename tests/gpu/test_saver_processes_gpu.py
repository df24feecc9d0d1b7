"""The memory saver on a GPU where a process is needed: for its hook mode, for how it ends, for its settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lifecycle.memory import hook_modes

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent


def python_path(*folders: Path) -> str:
    """These, before where packages are found in this process."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def program(code: str, mode: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of this hook mode, with the names of the backend's tests."""
    environment = {**os.environ, **variables}
    environment |= hook_modes.environment(mode, environment) if mode == "preload" else {}
    environment["PYTHONPATH"] = python_path(CHECKOUT, CHECKOUT / "tests", HERE)
    command = [sys.executable, "-c", f"from test_saver_gpu import *\n{code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_all_of_this_under_preload():
    """The backend's tests pass in a process started with the environment for hook mode preload, which ends well."""
    environment = {**os.environ, **hook_modes.environment("preload"), "PYTHONPATH": python_path(CHECKOUT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_saver_gpu.py")]
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("mode", ["torch", "preload"])
def test_a_process_may_end_with_paused_pools(mode):
    """The interpreter's end frees nothing outside a region, which the saver would answer with exit(1)."""
    code = (
        "model = build_in_region('a'); paused = build_in_region('b')\n"
        "backend = TorchMemorySaverBackend('b')\n"
        "adopted(paused, backend); backend.pause(Region.WEIGHTS)\n"
        "print(saver.ledger().mode)"
    )
    done = program(code, mode)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [mode]
    assert "torch_memory_saver.cpp" not in done.stderr


def test_the_saver_itself_ends_the_process():
    """What the ledger stands in front of: a second pause ends a process with status 1 and no exception."""
    code = (
        "model = build_in_region('a'); pause = saver.ledger()._saver._impl.pause\n"
        "torch.cuda.synchronize(); pause('a.weights')\n"
        "try: pause('a.weights')\n"
        "except BaseException: print('caught')"
    )
    done = program(code, "torch")

    assert done.returncode == 1
    assert "Cannot pause allocation that is not active" in done.stderr
    assert "caught" not in done.stdout


def test_expandable_segments_are_refused():
    """With expandable segments "auto" is storage and says why; the saver, asked for, is refused with the fix."""
    code = (
        "print(choose('auto', 'cuda').why)\n"
        "try: choose('torch_memory_saver', 'cuda')\n"
        "except hook_modes.SaverUnusable as error: print(error)"
    )
    done = program(code, "torch", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")

    assert done.returncode == 0, done.stderr
    why, error = done.stdout.splitlines()
    assert why.startswith("memory: storage, because expandable segments are on (PYTORCH_CUDA_ALLOC_CONF)")
    assert "set it to False" in error
