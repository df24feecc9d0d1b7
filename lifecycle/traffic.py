"""Bytes between device and host: how many were moved, and how many did not have to be."""

from __future__ import annotations

from attrs import define, field

from lifecycle.actions import BOTH, IN, OUT, Call
from lifecycle.versions import Facts
from lifecycle.work import target_version
from states.resources import VERSION_SLOTS, Slot


@define
class Traffic:
    """Bytes moved so far between device and host, in all and per region, and bytes that needed no move."""

    device_to_host: int = 0
    host_to_device: int = 0
    avoided: int = 0
    per_region: dict[str, dict[str, int]] = field(factory=dict)

    def count(self, direction: str, region: str, nbytes: int) -> None:
        for way in (OUT, IN) if direction == BOTH else (direction,):
            setattr(self, way, getattr(self, way) + nbytes)
            by_direction = self.per_region.setdefault(region, {})
            by_direction[way] = by_direction.get(way, 0) + nbytes


def avoided_bytes(facts: Facts, call: Call) -> int:
    """Weights bytes that this event leaves unmoved because they are where they are needed.

    Compared with backing up the whole version at every sleep and restoring it at every switch, as boolean-guarded
    trainers do (https://github.com/radixark/miles/pull/3128).
    """
    if call.event == "sleep":
        return sum(facts.parts[part].nbytes for slot, part in facts.device.items() if _spared(facts, slot, part))
    if call.event == "switch":
        held = facts.versions[target_version(facts, call)].parts.items() & facts.device.items()
        return sum(facts.parts[part].nbytes for _, part in held)
    return 0


def _spared(facts: Facts, slot: Slot, part: int) -> bool:
    return slot in VERSION_SLOTS and part in facts.copies
