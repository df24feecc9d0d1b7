"""What the checker's facts are of a concrete state: every bit that outlives an event, and which bits are left out.

[Note: not compared] ``NOT_COMPARED`` names bits that the run time has nothing for:
- ``checked``, ``verified``, ``held``, ``updating``, ``before.*``, ``was``: the checker's own memory during one event;
  what it decides by them shows in what the event leads to.
- ``received``, ``touched``: the session's memory during one event, likewise.
- inputs (``scope``, ``reading.*`` and so on): compared as guards, see ``test_agreement``; ``torn`` comes of them.
- ``given_up``: that a close which failed had given tags up; no fact says so, and only an invariant asks.
"""

from __future__ import annotations

from collections.abc import Mapping

from things import Pair, Things

from lifecycle.checker.ground import Program
from lifecycle.checker.words import ACTOR, BASE, INPUTS, LENT, LOCAL, REMEMBERED, WAS
from lifecycle.versions import Facts
from states.resources import SLOT_REGION, VERSION_SLOTS, Copy, Region, Slot

NOT_COMPARED = (*LOCAL, *INPUTS, *REMEMBERED, "given_up")
_WORDS = (WAS, "before", "touched", "received")


def compared(program: Program) -> int:
    """A mask of the bits that are compared."""
    return sum(
        1 << n
        for n, name in enumerate(program.bits)
        if name not in NOT_COMPARED and not any(word in name.split(".") for word in _WORDS)
    )


class Abstraction:
    """From pairs to bits, for one program."""

    def __init__(self, program: Program) -> None:
        self.program, self.of = program, program.words.of
        self.mask = compared(program)
        self.bit = {name: 1 << n for n, name in enumerate(program.bits)}
        self.slots = tuple(Slot(slot) for slot in self.of.slots)

    def __call__(self, pair: Pair) -> int:
        facts = pair.facts
        found = {**self._plain(pair), **self._sync(pair)}
        references = self._references(facts)
        for slot in self.slots:
            found |= self._slot(pair, references, slot)
        bits = sum(self.bit[name] for name, value in found.items() if value and name in self.bit)
        return bits & self.mask

    def _references(self, facts: Facts) -> dict[str, Mapping[Slot, int] | None]:
        """Parts of what each reference points at."""
        lease = next((lease for lease in facts.leases if lease.reader == "sync"), None)
        versions = {tag: facts.tags[tag] for tag in self.of.all_tags}
        found: dict[str, Mapping[Slot, int] | None] = {t: facts.versions[v].parts for t, v in versions.items()}
        found[BASE] = None if facts.phase is None else facts.versions[facts.phase.base].parts
        found[LENT] = None if lease is None else facts.versions[lease.version].parts
        return found

    def _plain(self, pair: Pair) -> dict[str, object]:
        facts, things = pair.facts, pair.things
        found: dict[str, object] = {region.value: region in facts.resident for region in Region}
        for slot in (Slot.OPTIMIZER, Slot.REST):
            part = facts.backups[slot]
            valid = facts.device.get(slot) == part
            # what was copied before the content changed is found out when it is measured, at the next copy
            stale = valid and facts.parts[part].fingerprint not in (None, things.contents[slot])
            found[f"{slot}.valid"], found[f"{slot}.copied"] = valid, part in facts.copies and not stale
        return {
            **found,
            "base.optimizer.copied": facts.phase is not None and facts.phase.optimizer_base in facts.copies,
            "optimizer.arriving": Slot.OPTIMIZER in facts.arriving,
            "working": facts.phase is not None,
            "groups": facts.groups_up,
            "sync_groups": facts.sync_groups,
            "grads": things.grads,
            "workspaces": things.workspaces,
            "graphs": things.graphs,
            "hooks": things.hooks,
            **({f"loading.{facts.load.tag}": True} if facts.load is not None else {}),
        }

    def _slot(self, pair: Pair, references: Mapping[str, Mapping[Slot, int] | None], slot: Slot) -> dict[str, object]:
        facts = pair.facts
        parts = {name: None if held is None else held[slot] for name, held in references.items()}
        on_device = facts.device.get(slot)
        found: dict[str, object] = {f"arriving.{slot}": slot in facts.arriving}
        for name, part in parts.items():
            found[f"half.{name}.{slot}"] = part is not None and part == facts.halves.get(slot)
            if facts.phase is not None:  # what the device holds is the phase's, whatever it is found to be in the end
                found[f"device.{name}.{slot}"] = name == ACTOR and on_device is not None
            else:
                found[f"device.{name}.{slot}"] = part is not None and part == on_device
            found[f"copied.{name}.{slot}"] = part in facts.copies
        names = list(parts)
        for n, one in enumerate(names):
            for other in names[n + 1 :]:
                found[f"same.{one}.{other}.{slot}"] = parts[one] is not None and parts[one] == parts[other]
        return found

    def _sync(self, pair: Pair) -> dict[str, object]:
        """By the parts: two versions may have the same, and the checker tells versions apart by nothing else."""
        facts, things = pair.facts, pair.things
        known = {**things.ledger, **{number: version.parts for number, version in facts.versions.items()}}
        references = self._references(facts)
        lease = next((lease for lease in facts.leases if lease.reader == "sync"), None)
        found: dict[str, object] = {"leased": lease is not None}
        if lease is not None:
            places = {facts.parts[part].slot: place for part, place in lease.sources.items()}
            found |= {f"lent.device.{slot}": places[slot] is Copy.DEVICE for slot in self.slots}
        published = None if facts.published is None else known[facts.published]
        for name, engine in things.engines.items():
            held = None if engine.version is None else known[engine.version]
            found[f"{name}.known"] = found[f"{name}.sound"] = held is not None
            found[f"{name}.generating"] = engine.generating
            found |= {f"{name}.has.{r}": held is not None and held == parts for r, parts in references.items()}
        found |= {f"published.{r}": published is not None and published == parts for r, parts in references.items()}
        return found


def lies(facts: Facts, things: Things, untracked: bool) -> list[str]:
    """What the facts claim that is not so. A part without a fingerprint claims nothing.

    ``untracked``: somebody has written on the device behind everybody's back.
    """
    found = []
    for slot, part in facts.device.items():
        if SLOT_REGION[slot] not in things.mapped:
            found.append(f"{slot} is said to be on the device")
        known = facts.parts[part].fingerprint
        changing = slot is Slot.REST or (untracked and slot in VERSION_SLOTS)
        if not changing and known not in (None, things.contents[slot]):
            found.append(f"the device holds other bytes in {slot}")
    for part in facts.copies:
        known = facts.parts[part].fingerprint
        if known not in (None, things.buffers.get(part)):
            found.append(f"the copy of part {part} is not there, or is another's")
    for slot, part in facts.halves.items():
        if facts.parts[part].fingerprint not in (None, things.halves.get(slot)):
            found.append(f"what went out of {slot} is not whole any more")
    for name, version in facts.engines.items():
        if version is not None and things.engines[name].version not in (None, version):
            found.append(f"engine {name} holds another version")
    return found
