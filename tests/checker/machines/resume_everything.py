"""All regions are resumed at once, also those that are mapped: a forward-only wake, then the actor's (F104:
https://github.com/vllm-project/vllm/issues/31618)."""

from lifecycle.checker.formula import TRUE
from lifecycle.checker.meaning_memory import REGIONS, resume_region
from tests.checker.machines.variants import model


def _resume(asked):
    for region in REGIONS:
        yield from resume_region(asked.words, region, TRUE)


MACHINE = model(resume_actor_regions=_resume)
INVARIANT = "alternation"
LENGTH = 3
