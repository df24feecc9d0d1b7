"""Builds the fake driver, and runs programs over it with the memory saver's shipped library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from attrs import define, frozen

from lifecycle.memory.hook_modes import environment

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
DEVICE_BYTES = 256 << 20


def skip_unless_possible() -> None:
    pytest.importorskip("torch_memory_saver", reason="has wheels for Linux on x86-64 alone")
    if torch.version.cuda is not None:
        pytest.skip("needs a torch without CUDA: one with CUDA brings its own runtime, where the fake one must be")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to build the fake driver")


def build(folder: Path) -> None:
    """libcuda.so.1 and libcudart.so.13, in this folder."""
    shared = ["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart.so.13"
    subprocess.run([*shared, "-Wl,-soname,libcuda.so.1", "-o", driver, HERE / "fake_driver.c"], check=True)
    versions = f"-Wl,-soname,libcudart.so.13,--version-script,{HERE / 'fake_runtime.map'}"
    subprocess.run(
        [*shared, versions, "-o", runtime, HERE / "fake_runtime.c", f"-L{folder}", "-l:libcuda.so.1"], check=True
    )


def variables(folder: Path, mode: str) -> dict[str, str]:
    """The environment of a process in which the saver runs over the fakes in this folder."""
    path = os.pathsep.join([str(CHECKOUT), str(HERE)])
    found = {**os.environ, "PYTHONPATH": path, "FAKE_DEVICE_BYTES": str(DEVICE_BYTES)}
    found.pop("LD_PRELOAD", None)
    found.update(environment(mode, found) if mode == "preload" else {})
    return found | {"LD_LIBRARY_PATH": str(folder)}


@frozen
class Ran:
    """How a program ended (99: by an exception) and what it wrote."""

    status: int
    out: str
    err: str


@define
class World:
    """A process to run programs in forks of: see ``saver_world``."""

    process: subprocess.Popen[str]
    mode: str

    def run(self, program: str) -> Ran:
        print(json.dumps(dedent(program)), file=self.process.stdin, flush=True)
        return Ran(**self._reply())

    def lives(self, program: str) -> str:
        """The program must end well; what it printed."""
        ran = self.run(program)
        assert ran.status == 0, ran.err
        return ran.out

    def dies(self, program: str) -> str:
        """The program must be ended by the saver, with status 1; what it said."""
        ran = self.run(program)
        assert ran.status == 1, ran
        return ran.err

    def _reply(self):
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)


def open_world(folder: Path, mode: str) -> World:
    command = [sys.executable, str(HERE / "saver_world.py")]
    process = subprocess.Popen(
        command, env=variables(folder, mode), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    world = World(process, mode)
    assert world._reply() == "ready"
    return world
