"""The version counts as published before the engines have acknowledged it: groups are opened under a version that
nobody serves yet (F049: https://github.com/PrimeIntellect-ai/prime-rl/pull/3050)."""

from tests.checker.machines.variants import model, with_effects

_SEND = (
    *("pause_generation", "flush_caches", "publish_version", "send_weights", "check_engines", "agree", "end_updates"),
    *("rotate_tags", "continue_generation", "lower_sync_groups", "release_source"),
)
MACHINE = model(with_effects(_SEND, "finish_sync"))
INVARIANT = "published_when_applied"
LENGTH = 2
