"""Prose about files stays true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "AGENTS.md",
    "README.md",
    "docs/architecture.md",
    "docs/checker-spin.md",
    "docs/checker.md",
    "docs/diagrams.md",
    "docs/extending.md",
]
PATH = re.compile(r"`((?:states|lifecycle|tests|docs|\.ci)/[\w./-]*|[\w-]+\.(?:md|toml))`")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    """Each file that a page names is there."""
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))

    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_agents_page_is_short():
    """The page for agents fits on a screen."""
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60
