"""Ours among the peers: an attached actor, and what its journal says about each thing it did."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import asdict, define, field, frozen

import lifecycle
from lifecycle.actions import IN, OUT
from lifecycle.bench.model import Decoder, change, random_weights, weights_bytes
from lifecycle.bench.packing import Memory, Shapes, require_pieces
from lifecycle.bench.shapes import LAYERS, VOCABULARY, llama_shapes
from lifecycle.bench.timing import Turn
from lifecycle.config import LifecycleConfig
from lifecycle.controller import ActorLifecycle
from lifecycle.journal import Record
from states.resources import Region

GIB = 2**30


@frozen
class Options:
    """What all benchmarks of memory share. ``memory``, ``host`` and ``verify`` as the actor takes them.

    ``pieces``: one per "tensor", per "layer", one for the whole "model", or of so many MiB, like "64"; see
    ``lifecycle.bench.pieces``. ``rest``: seconds that the device is idle before everything that is timed; see
    ``in_turns``. Raises ValueError for pieces that are none of these.
    """

    gib: float = 8.0
    rounds: int = 5
    memory: str = "auto"
    host: str = "auto"
    verify: str = "always"
    pieces: str = field(default="256", validator=lambda _, __, pieces: require_pieces(pieces))
    rest: float = 0.25

    @property
    def nbytes(self) -> int:
        return int(self.gib * GIB)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@frozen(eq=False)
class Subject:
    """A model with random weights of these ``shapes``, and its actor."""

    shapes: Shapes
    model: Decoder
    actor: ActorLifecycle

    @property
    def nbytes(self) -> int:
        return weights_bytes(self.model)

    def make_dirty(self) -> None:
        """Give 'actor' a version whose only copy is on the device."""
        with self.actor.loading("actor"):
            change(self.model)

    def bare(self) -> Turn:
        """The backend's own resume and pause of the weights' memory, while the actor sleeps, and nothing beside them.

        Of the same memory that is timed otherwise, in the same pieces.
        """
        memory = self.actor.memory
        steps = {"wake": partial(memory.resume, Region.WEIGHTS), "sleep": partial(memory.pause, Region.WEIGHTS)}
        return Turn(steps, self.actor.sleep, lambda step: self.actor.wake_up() if step == "sleep" else None)

    def land(self) -> None:
        """Have what a wake has begun be over and checked, so that the next event is not charged with it."""
        with self.actor.hold():
            pass


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def attached(
    options: Options, tags: tuple[str, ...] = (), layers: int = LAYERS, vocabulary_of_hidden: float = VOCABULARY
) -> Iterator[Subject]:
    """A model of that size, allocated as the actor's memory backend wants it, and the actor, awake."""
    region = partial(lifecycle.region, "weights", "actor", options.memory)
    shapes = llama_shapes(options.nbytes, layers, vocabulary_of_hidden)
    model = Decoder(random_weights(shapes, device_here(), memory=Memory(options.pieces, region)))
    model.eval()
    config = LifecycleConfig(verify=options.verify)  # type: ignore[arg-type]
    with ActorLifecycle(model, tags=tags, memory=options.memory, host=options.host, config=config) as actor:
        yield Subject(shapes, model, actor)


@frozen
class Effect:
    """One kind of effect in one event: how long, and how many bytes which way."""

    seconds: float
    nbytes: int
    direction: str | None


@frozen
class Seen:
    """What one event did. ``copies_out`` and ``copies_in`` are seconds: from the first copy's beginning until the
    bytes were there, which may be after the event returned."""

    effects: Mapping[str, Effect]
    copies_out: float
    copies_in: float

    def moved(self, direction: str) -> int:
        return sum(effect.nbytes for effect in self.effects.values() if effect.direction == direction)


@define
class Watch:
    """Reads the journal between two marks. The device is idle at both."""

    actor: ActorLifecycle
    seen: dict[str, list[Seen]] = field(factory=dict)
    _seq: int = 0

    def start(self) -> None:
        self._seq = self.actor.journal[-1].seq

    def stop(self, name: str) -> None:
        """What has been done since ``start``, or the last ``stop``, is one round of ``name``."""
        now = time.time()
        records = [r for r in self.actor.journal if r.seq > self._seq and r.kind == "effect"]
        self.start()
        self.seen.setdefault(name, []).append(_seen(records, now))

    def split(self, name: str) -> dict[str, Any]:
        """Median seconds of each effect over the rounds, and the bytes of the last round."""
        rounds = self.seen[name]
        names = list(dict.fromkeys(effect for one in rounds for effect in one.effects))
        return {
            effect: {
                "seconds": statistics.median(one.effects[effect].seconds for one in rounds if effect in one.effects),
                "nbytes": next(one.effects[effect].nbytes for one in reversed(rounds) if effect in one.effects),
            }
            for effect in names
        }

    def copies(self, name: str, direction: str) -> tuple[float, int]:
        """Median seconds of the copies one way, and their bytes."""
        rounds = self.seen[name]
        seconds = statistics.median(one.copies_out if direction == OUT else one.copies_in for one in rounds)
        return seconds, rounds[-1].moved(direction)


def _seen(records: list[Record], now: float) -> Seen:
    effects: dict[str, Effect] = {}
    for one in records:
        name = one.effect or ""
        had = effects.get(name, Effect(0.0, 0, one.direction))
        effects[name] = Effect(had.seconds + one.seconds, had.nbytes + one.nbytes, had.direction or one.direction)
    out = sum(one.seconds for one in records if one.direction == OUT)  # complete when the effect ends
    began = [one.time - one.seconds for one in records if one.direction == IN]
    return Seen(effects, out, now - min(began) if began else 0.0)
