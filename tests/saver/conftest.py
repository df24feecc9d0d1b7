"""The fake driver, built once, and a process over it per hook mode."""

from __future__ import annotations

import pytest
from saver_rig import build, open_world, skip_unless_possible


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """The folder with the fake driver and the fake runtime."""
    skip_unless_possible()
    folder = tmp_path_factory.mktemp("fakes")
    build(folder)
    return folder


@pytest.fixture(scope="session", params=["preload", "torch"])
def world(request, fakes):
    """Where programs run with the memory saver over the fake driver, in each of its hook modes."""
    opened = open_world(fakes, request.param)
    yield opened
    opened.process.stdin.close()
    opened.process.wait()
    opened.process.stdout.close()
