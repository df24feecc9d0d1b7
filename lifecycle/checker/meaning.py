"""What every effect of the catalogue does to the facts of the abstraction.

This is the checker's own account of ``lifecycle/work.py`` and ``lifecycle/outcome.py``, written so that a search and
other tools can run it; ``tests/checker/test_agreement.py`` compares the two on every reachable state.
"""

from __future__ import annotations

from lifecycle.checker.meaning_memory import MEMORY
from lifecycle.checker.meaning_sync import SYNC
from lifecycle.checker.meaning_training import TRAINING
from lifecycle.checker.steps import Meaning

MEANINGS: dict[str, Meaning] = {**MEMORY, **TRAINING, **SYNC}
