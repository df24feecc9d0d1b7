"""Which versions, parts and copies something still needs, and forgetting the others. Pure."""

from __future__ import annotations

from attrs import evolve

from lifecycle.versions import Facts


def referenced_versions(facts: Facts) -> set[int]:
    held = set(facts.tags.values()) | {lease.version for lease in facts.leases}
    if facts.phase is not None:
        held |= {facts.phase.version, facts.phase.base}
    if facts.load is not None:
        held.add(facts.load.version)
    return held


def referenced_parts(facts: Facts) -> set[int]:
    """Parts that must not lose their last copy."""
    held = {part for version in referenced_versions(facts) for part in facts.versions[version].parts.values()}
    held |= set(facts.backups.values())
    if facts.phase is not None:
        held.add(facts.phase.optimizer_base)
    return held


def prune(facts: Facts) -> Facts:
    """Forget versions, parts and copies that nothing references. What the device holds stays known."""
    versions, parts = referenced_versions(facts), referenced_parts(facts)
    known = parts | set(facts.device.values())
    return evolve(
        facts,
        versions={i: v for i, v in facts.versions.items() if i in versions},
        parts={i: p for i, p in facts.parts.items() if i in known},
        copies={i: c for i, c in facts.copies.items() if i in parts},
        halves={slot: i for slot, i in facts.halves.items() if i in parts},
        doubted=facts.doubted & parts,
    )
