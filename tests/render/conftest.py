"""What the tests of the pictures need."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(name="needs_dot")
def _needs_dot():
    if shutil.which("dot") is None:
        pytest.skip("Graphviz's program dot is not installed: apt install graphviz")
