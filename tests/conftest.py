"""Fixtures that several files share; what they are made of is in ``rig``."""

from __future__ import annotations

import gc
import signal
from functools import cache

import pytest
import torch
from rig import Rig, make_busy, make_rig

# Small models are slower on more threads.
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Attaching looks through all objects for tensors; those that were imported are put out of its sight."""
    _import_what_is_imported_late()
    gc.collect()
    gc.freeze()


@cache
def _import_what_is_imported_late() -> None:
    make_busy(make_rig()).actor.close()


@pytest.fixture
def make(few_objects):
    """make(...) attaches a fresh model: see ``rig.make_rig``."""
    return make_rig


@pytest.fixture
def rig(few_objects) -> Rig:
    """Three tags with weights of their own, the actor's only copy on the device; complete copies are read-only."""
    return make_busy(make_rig(protect_copies=True))


@pytest.fixture
def ctrl_c():
    """Python's own handler, also where the tests run in the background of a shell, which has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items):
    """Without a CUDA device its tests are skipped, and say why."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
