"""The part of the effect catalogue (``states/effects.py``) that brings a version to the engines."""

from __future__ import annotations

from states.resources import Fact
from states.spec import Effect

SYNC_EFFECTS: tuple[Effect, ...] = (
    Effect(
        "raise_sync_groups",
        "Bring process groups up for this sync, where they are down.",
        needs=[Fact.AGREED],
        gives=[Fact.SYNC_GROUPS, Fact.GROUPS_READY],
        inverse="lower_sync_groups",
    ),
    Effect(
        "lower_sync_groups",
        "Take down the groups raised for this sync.",
        forbids=[Fact.ENGINES_PAUSED],
        takes=[Fact.SYNC_GROUPS],
        harmless=True,
    ),
    Effect(
        "connect_engines",
        "Choose each engine's transport, outside the memory backend's pools.",
        needs=[Fact.GROUPS_READY],
        gives=[Fact.CONNECTED],
        harmless=True,
    ),
    Effect(
        "lease_source",
        "Choose the readable copies of the version, device first, and lease them.",
        gives=[Fact.SOURCE_LEASED],
        needs=[Fact.SETTLED, Fact.CONNECTED],
        inverse="release_source",
    ),
    Effect("release_source", "End the lease.", takes=[Fact.SOURCE_LEASED], harmless=True),
    Effect(
        "pause_generation",
        "Engines stop generating; no request is admitted.",
        needs=[Fact.SOURCE_LEASED],
        gives=[Fact.ENGINES_PAUSED],
        inverse="continue_untouched",
    ),
    Effect(
        "continue_untouched",
        "Engines that saw no byte go on as before; the others stay paused.",
        needs=[Fact.UPDATES_ENDED],
        gives=[Fact.OTHERS_CONTINUE],
        takes=[Fact.ENGINES_PAUSED],
        harmless=True,
    ),
    Effect(
        "flush_caches",
        "Engines drop what was derived from old weights.",
        needs=[Fact.ENGINES_PAUSED],
        gives=[Fact.CACHES_FLUSHED],
        harmless=True,
    ),
    Effect(
        "send_weights",
        "Engines take the leased bytes; from the first byte on they hold no version.",
        needs=[Fact.SOURCE_LEASED, Fact.ENGINES_PAUSED, Fact.CACHES_FLUSHED],
        gives=[Fact.UPDATE_OPEN],
        inverse="abort_updates",
    ),
    Effect(
        "abort_updates",
        "Engines that saw a byte hold no version and stay paused.",
        gives=[Fact.UPDATES_ENDED],
        takes=[Fact.UPDATE_OPEN],
        harmless=True,
    ),
    Effect(
        "check_engines",
        "Compare fingerprints in the engines with the version's.",
        needs=[Fact.UPDATE_OPEN],
        gives=[Fact.ENGINES_CHECKED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "end_updates",
        "Engines take the version's number.",
        needs=[Fact.UPDATE_OPEN, Fact.ENGINES_CHECKED, Fact.AGREED],
        takes=[Fact.UPDATE_OPEN],
        inverse="abort_updates",
    ),
    Effect(
        "publish_version",
        "Every engine holds the version: it is the published one.",
        forbids=[Fact.UPDATE_OPEN],
        gives=[Fact.PUBLISHED],
        inverse="withdraw_version",
    ),
    Effect("withdraw_version", "The published version is the one before.", takes=[Fact.PUBLISHED], harmless=True),
    Effect(
        "rotate_tags",
        "Move the tags that rotate after a sync.",
        forbids=[Fact.UPDATE_OPEN],
        needs=[Fact.PUBLISHED],
        gives=[Fact.ROTATED],
        inverse="rotate_back",
    ),
    Effect("rotate_back", "Tags point where they pointed before.", harmless=True),
    Effect(
        "continue_generation",
        "Engines generate again.",
        forbids=[Fact.UPDATE_OPEN],
        takes=[Fact.ENGINES_PAUSED],
        # nothing may count as published while engines are stopped again, which the inverse of end_updates does
        needs=[Fact.ROTATED],
        inverse="withdraw_version",
    ),
)
