"""What exists at rest in a world of tokens instead of tensors: values that can be kept and compared."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from attrs import field, frozen

from lifecycle.checker.words import Instance
from lifecycle.versions import Facts, Part, first_facts
from states.resources import Copy, Region, Slot

MAPPED = (Region.WEIGHTS, Region.OPTIMIZER, Region.REST)
BYTES = 8
_tokens = count(1)


def fresh() -> str:
    """Bytes that nothing else has, by their fingerprint."""
    return f"{next(_tokens):016x}"


@frozen
class EngineThing:
    version: int | None = None
    weights: Mapping[Slot, str] = field(factory=dict)
    generating: bool = False


@frozen
class Things:
    """What exists. ``ledger``: the parts of versions that engines hold or that were published, by number.

    ``halves``: what a slot and the buffer that its bytes are going out to hold between them; the slot alone may then
    hold the old bytes, the ones that come in, or some of each.
    """

    contents: Mapping[Slot, str]
    engines: Mapping[str, EngineThing]
    buffers: Mapping[int, str] = field(factory=dict)
    halves: Mapping[Slot, str] = field(factory=dict)
    mapped: frozenset[Region] = frozenset(MAPPED)
    groups: bool = True
    hooks: bool = True
    grads: bool = False
    workspaces: bool = False
    graphs: bool = False
    keeps_addresses: bool = True
    stream_ordered: bool = True
    overlaps: bool = True
    ledger: Mapping[int, Mapping[Slot, int]] = field(factory=dict)
    sync_tag: str | None = None


@frozen
class Pair:
    """The concrete side of a state: what is known, and what is."""

    facts: Facts
    things: Things


def first_pair(one: Instance) -> Pair:
    """Freshly attached: the optimizer has state that nobody has measured yet."""
    contents = {Slot(slot): fresh() for slot in (*one.slots, "optimizer", "rest")}
    parts = [
        Part(n, slot, BYTES) if slot is Slot.OPTIMIZER else Part(n, slot, BYTES, token, {"t": token})
        for n, (slot, token) in enumerate(contents.items(), start=1)
    ]
    facts = first_facts(parts, one.tags, MAPPED, True, Copy.HOST)
    able = {word: getattr(one, word) for word in ("keeps_addresses", "stream_ordered", "overlaps")}
    return Pair(facts, Things(contents, {name: EngineThing() for name in one.engines}, **able))
