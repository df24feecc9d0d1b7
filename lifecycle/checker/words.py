"""The facts of the abstraction, by name, for one instance: so many tags, slots and engines.

[Note: references] A *reference* is whatever must keep its weights: each tag, and the passing ones ``base`` (what an
open phase started from), ``lent`` (what a sync reads) and ``was`` (what a tag pointed at before this event, for
inverses). No version has a number here. Whether two references point at the same part is itself a fact (``same``), so
that no two states differ only in how versions are numbered.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from lifecycle.checker.formula import FALSE, TRUE, Assignment, Bit, Expr, all_of, any_of

ACTOR = "actor"
BASE, LENT, WAS = "base", "lent", "was"

#: Facts of one event: they are false whenever the machine rests.
LOCAL = ("held", "updating")
REMEMBERED = ("before.tags", "before.weights", "before.optimizer", "before.rest")

PLAIN = (
    *("weights", "grads", "optimizer", "workspaces", "rest"),
    *("optimizer.valid", "optimizer.copied", "rest.valid", "rest.copied", "base.optimizer.copied"),
    *("optimizer.arriving", "working", "groups", "sync_groups", "hooks", "leased", "graphs", "given_up"),
)

#: [Note: inputs] What others do at any time, and only guards ask about, is no part of a resting state: whenever an
#: event is asked for it may be so or not, unless a guard of the event rules it out. ``torn`` is what comes of it.
INPUTS = ("scope", "backward_left", "reading.device", "reading.host", "memory_short", "no_optimizer", "torn")


@frozen
class Instance:
    """How much of everything there is. ``tags`` are those beside 'actor'; ``keep``: regions that a sleep keeps.

    ``labels``: tags of which it is tracked whether their version is the published one, and the one that an engine has.
    Nothing decides by these labels, so tracking more of them finds nothing more and multiplies the states.
    """

    tags: tuple[str, ...] = ("ref", "old_actor")
    engines: tuple[str, ...] = ("a",)
    slots: tuple[str, ...] = ("frozen", "trained")
    labels: tuple[str, ...] = (ACTOR,)
    keep: frozenset[str] = frozenset()
    keeps_addresses: bool = True
    stream_ordered: bool = True  # bytes of a restore may come after the event that asked for them
    overlaps: bool = True  # a switch copies out and in at once
    restore_aborted: bool = True
    optimizer: bool = True  # there is one; found out from the declaration

    def __attrs_post_init__(self) -> None:
        names = (*self.tags, *self.engines)
        wrong = [name for name in names if not name.isidentifier() or name in (ACTOR, BASE, LENT, WAS)]
        if wrong or len(set(names)) != len(names):
            raise ValueError(
                f"tags {', '.join(self.tags) or 'none'} and engines {', '.join(self.engines) or 'none'}: names are "
                f"distinct identifiers, and none of actor, {BASE}, {LENT}, {WAS}"
            )

    @property
    def backups(self) -> tuple[str, ...]:
        """Regions of one current content."""
        return ("optimizer", "rest") if self.optimizer else ("rest",)

    @property
    def all_tags(self) -> tuple[str, ...]:
        return (ACTOR, *self.tags)

    @property
    def references(self) -> tuple[str, ...]:
        return (*self.all_tags, BASE, LENT, WAS)


@frozen
class Words:
    """Builds the bits of an instance, and formulas and assignments over them."""

    of: Instance
    own: tuple[str, ...] = ()  # facts that the declared machine has of its own

    def names(self) -> tuple[str, ...]:
        one = self.of
        pairs = [(a, b) for n, a in enumerate(one.references) for b in one.references[n + 1 :]]
        return (
            *PLAIN,
            *LOCAL,
            *INPUTS,
            *REMEMBERED,
            *(f"device.{r}.{s}" for r in one.references for s in one.slots),
            *(f"copied.{r}.{s}" for r in one.references for s in one.slots),
            *(f"half.{r}.{s}" for r in one.references for s in one.slots),
            *(f"arriving.{s}" for s in one.slots),
            *(f"same.{a}.{b}.{s}" for a, b in pairs for s in one.slots),
            *(f"lent.device.{s}" for s in one.slots),
            *(f"loading.{t}" for t in one.all_tags),
            *(f"published.{r}" for r in self.labelled),
            *(f"before.published.{t}" for t in one.labels),
            *(f"{e}.{word}" for e in one.engines for word in ("generating", "known", "sound", "received", "touched")),
            *(f"{e}.has.{r}" for e in one.engines for r in self.labelled),
            *(f"own.{fact}" for fact in self.own),
        )

    @property
    def labelled(self) -> tuple[str, ...]:
        """References of which labels are tracked."""
        return (*self.of.labels, *((BASE,) if ACTOR in self.of.labels else ()), *((WAS,) if self.of.labels else ()))

    def local(self) -> tuple[str, ...]:
        """Names of the bits that are false whenever the machine rests."""
        words = (WAS, "before", "touched", "received")
        return (*LOCAL, *INPUTS, *(name for name in self.names() if any(word in name.split(".") for word in words)))

    # one bit

    def __call__(self, name: str) -> Expr:
        return Bit(name)

    def device(self, reference: str, slot: str) -> Expr:
        """The device holds the reference's part."""
        return Bit(f"device.{reference}.{slot}")

    def copied(self, reference: str, slot: str) -> Expr:
        """The reference's part has a copy off the device."""
        return Bit(f"copied.{reference}.{slot}")

    def half(self, reference: str, slot: str) -> Expr:
        """The reference's part is partly in its copy and partly on the device."""
        return Bit(f"half.{reference}.{slot}")

    def same(self, one: str, other: str, slot: str) -> Expr:
        """Both point at the same part."""
        if one == other:
            return TRUE
        order = self.of.references.index
        first, second = sorted((one, other), key=order)
        return Bit(f"same.{first}.{second}.{slot}")

    # formulas

    def shows(self, reference: str) -> Expr:
        """The device holds every part of it."""
        return all_of(self.device(reference, slot) for slot in self.of.slots)

    def same_version(self, one: str, other: str) -> Expr:
        return all_of(self.same(one, other, slot) for slot in self.of.slots)

    def readable(self, reference: str) -> Expr:
        """Every part has a copy somewhere."""
        return all_of(
            self.device(reference, slot) | self.copied(reference, slot) | self.half(reference, slot)
            for slot in self.of.slots
        )

    def arriving(self) -> Expr:
        return any_of(Bit(f"arriving.{slot}") for slot in self.of.slots)

    def half_moved(self, slot: str) -> Expr:
        return any_of(self.half(r, slot) for r in self.of.references)

    def loading(self) -> Expr:
        return any_of(Bit(f"loading.{tag}") for tag in self.of.all_tags)

    def generating(self, engine: str) -> Expr:
        return Bit(f"{engine}.generating")

    # assignments

    def let(self, value: bool | Expr, *names: str) -> tuple[Assignment, ...]:
        expr = value if isinstance(value, Expr) else TRUE if value else FALSE
        return tuple((name, expr) for name in names)

    def lose(self, slots: Iterable[str]) -> tuple[Assignment, ...]:
        """The bytes in these slots are worth nothing from here on; whoever was reading them there has torn bytes."""
        slots = tuple(slots)
        return (*self.hand_over(slots), *self.let(False, *(f"arriving.{s}" for s in slots)))

    def hand_over(self, slots: Iterable[str]) -> tuple[Assignment, ...]:
        """Somebody else writes in these slots from here on; what is on its way there still comes."""
        lost = self.let(False, *(f"device.{r}.{s}" for r in self.of.references for s in slots))
        return (*lost, self.disturbed())

    def disturbed(self) -> Assignment:
        """What a reader of the device has leased is not what it leased any more."""
        return "torn", Bit("torn") | Bit("reading.device")

    def hold(self, reference: str, slot: str) -> tuple[Assignment, ...]:
        """The device holds the reference's part, and so everybody's who points at the same."""
        return tuple((f"device.{r}.{slot}", self.same(reference, r, slot)) for r in self.of.references)

    def copy_device(self, slot: str) -> tuple[Assignment, ...]:
        """What the device holds in the slot has a copy."""
        return tuple((f"copied.{r}.{slot}", self.copied(r, slot) | self.device(r, slot)) for r in self.of.references)

    def put_together(self, slot: str) -> tuple[Assignment, ...]:
        """The copy of what was half moved is complete."""
        copied = ((f"copied.{r}.{slot}", self.copied(r, slot) | self.half(r, slot)) for r in self.of.references)
        return (*copied, *self.let(False, *(f"half.{r}.{slot}" for r in self.of.references)))

    def point(self, name: str, at: str) -> tuple[Assignment, ...]:
        """``name`` points at the version that ``at`` points at."""
        made: list[Assignment] = []
        for slot in self.of.slots:
            made += [(f"device.{name}.{slot}", self.device(at, slot)), (f"copied.{name}.{slot}", self.copied(at, slot))]
            made += [(f"half.{name}.{slot}", self.half(at, slot)), *self.likened(name, slot, at)]
        return (*made, *self.labels_like(name, at))

    def renew(self, name: str, slots: Iterable[str], on_device: bool) -> tuple[Assignment, ...]:
        """``name`` points at new parts in these slots, which the device holds, or nobody yet."""
        made: list[Assignment] = []
        slots = tuple(slots)
        for slot in slots:
            made += [(f"device.{r}.{slot}", FALSE) for r in self.of.references if r != name]
            made += [(f"device.{name}.{slot}", TRUE if on_device else FALSE), (f"copied.{name}.{slot}", FALSE)]
            made += self.likened(name, slot, None)
        return (*made, *(self.labels_like(name, None) if slots else ()))

    def forget(self, name: str) -> tuple[Assignment, ...]:
        """A passing reference ends."""
        made: list[Assignment] = []
        for slot in self.of.slots:
            made += self.let(False, *(f"{word}.{name}.{slot}" for word in ("device", "copied", "half")))
            made += self.likened(name, slot, None)
        return (*made, *self.labels_like(name, None))

    def likened(self, name: str, slot: str, at: str | None) -> list[Assignment]:
        """``name`` is the same as those that ``at`` is the same as; as nobody where ``at`` is None."""
        made = []
        for other in self.of.references:
            if other != name:
                bit = self.same(name, other, slot)
                assert isinstance(bit, Bit)
                made.append((bit.name, FALSE if at is None else self.same(at, other, slot)))
        return made

    def labels_like(self, name: str, at: str | None) -> list[Assignment]:
        """``name`` has the labels of ``at``; none where ``at`` is None, or is not tracked."""
        if name not in self.labelled:
            return []
        kinds = ["published", *(f"{engine}.has" for engine in self.of.engines)]
        return [(f"{kind}.{name}", Bit(f"{kind}.{at}") if at in self.labelled else FALSE) for kind in kinds]


_PHRASES = {
    "weights": "weights mapped",
    "grads": "gradients present",
    "optimizer": "optimizer mapped",
    "workspaces": "workspaces present",
    "rest": "rest mapped",
    "optimizer.valid": "device holds the optimizer state",
    "optimizer.copied": "optimizer state has a copy",
    "rest.valid": "device holds the rest",
    "rest.copied": "rest has a copy",
    "optimizer.arriving": "optimizer state on its way to the device",
    "base.optimizer.copied": "optimizer state from before the phase has a copy",
    "working": "training phase open",
    "groups": "process groups up",
    "sync_groups": "groups raised for the sync",
    "hooks": "hooks installed",
    "leased": "sync source leased",
    "graphs": "graphs captured",
    "given_up": "other tags given up by a close",
}
_ROLES = {BASE: "the phase's base", LENT: "the leased version", WAS: "the tag's old version"}
_ENGINE = {
    "generating": "generates",
    "known": "holds a version",
    "sound": "holds all of its version's bytes",
    "received": "received all bytes",
    "touched": "saw a byte",
}


def read_as(name: str) -> str:
    """A bit's name as a sentence part for people."""
    if name in _PHRASES:
        return _PHRASES[name]
    head, *rest = name.split(".")
    who = _ROLES.get(rest[0], rest[0]) if rest else ""
    if head == "own":
        return ".".join(rest)
    if head == "device":
        return f"device holds {who}'s {rest[1]} part"
    if head == "copied":
        return f"{who}'s {rest[1]} part has a copy"
    if head == "half":
        return f"{who}'s {rest[1]} part is half moved"
    if head == "arriving":
        return f"the {rest[0]} part is on its way to the device"
    if head == "same":
        return f"{who} and {_ROLES.get(rest[1], rest[1])} have one {rest[2]} part"
    if name.startswith("lent.device."):
        return f"the sync reads the {rest[1]} part on the device"
    if head == "loading":
        return f"load of {who} open"
    if head == "published":
        return f"{who}'s version is the published one"
    if rest and rest[0] == "has":
        return f"engine {head} has {_ROLES.get(rest[1], rest[1])}'s version"
    return f"engine {head} {_ENGINE[rest[0]]}" if rest and rest[0] in _ENGINE else name
