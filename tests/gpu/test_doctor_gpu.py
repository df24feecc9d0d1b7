"""The doctor on a machine with a GPU, in processes of its own: it starts the memory saver, whose hook mode stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def doctor(*arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Findings by name."""
    command = [sys.executable, "-m", "lifecycle", "doctor", "--json", *arguments]
    own = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == (told["status"] == "error"), done.stderr
    return {one["name"]: one for section in told["sections"].values() for one in section}


def test_what_is_found_and_measured():
    """The device, the saver as backend, and every speed as a number; pinning of ours beside cudaMallocHost."""
    found = doctor()

    assert "GiB free" in found["cuda:0"]["found"]
    assert found["memory='auto'"]["status"] == "ok", found["memory='auto'"]
    assert found["memory='auto'"]["found"].startswith("torch_memory_saver ")
    for name in (
        "filling host memory",
        "copying in host memory",
        "pinning, host='pinned'",
        "pinning, host='shared'",
        "pinning, cudaMallocHost",
        "device to host",
        "host to device",
        "both ways at once",
        "fingerprint on cuda",
    ):
        assert found[name]["status"] == "ok", found[name]
        assert found[name]["value"] > 0.1
        assert found[name]["unit"] == "GB/s"


def test_expandable_segments_are_told_with_the_fix():
    """The saver can not be used then; the finding says what is used, and what to take out of the environment."""
    found = doctor("--no-measure", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")

    assert found["allocator"]["status"] == "warning"
    assert "PYTORCH_CUDA_ALLOC_CONF" in found["allocator"]["advice"]
    assert found["memory='auto'"]["status"] == "warning"
    assert found["memory='auto'"]["found"].startswith("storage, because expandable segments")


def test_preloaded_library_is_told():
    """A process started with the saver's library is in hook mode preload, and the choice is made in it."""
    code = "import json; from lifecycle.memory.hook_modes import environment; print(json.dumps(environment('preload')))"
    own = {**os.environ, "PYTHONPATH": PYTHONPATH}
    told = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    found = doctor("--no-measure", **json.loads(told.stdout.splitlines()[-1]))

    assert found["hook mode"]["found"].startswith("preload (torch_memory_saver_hook_mode_preload")
    assert found["memory='auto'"]["status"] == "ok", found["memory='auto'"]
    assert found["memory='auto'"]["found"].endswith("hook mode preload")
