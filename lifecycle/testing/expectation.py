"""What must be true of a driven actor: a dictionary of tensors, and when which event may happen.

Written from the documentation alone. It knows no plans, parts or copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from lifecycle.testing.subjects import Contents, Tensors
from lifecycle.versions import ACTOR
from states.resources import Region


@frozen
class Phase:
    """An open training phase, and what there was before it."""

    base: Contents
    version: int
    implicit: bool = False
    trained: bool = False


@define
class Reader:
    """An open ``weights()`` block and what it must go on reading."""

    block: AbstractContextManager[Mapping[str, torch.Tensor]]
    views: Mapping[str, torch.Tensor]
    content: Tensors
    on_device: bool


@define
class Scope:
    """An open ``using()`` block and the tag shown before it (None: it was asleep)."""

    block: AbstractContextManager[Any]
    back: str | None


@define
class Expected:
    """The tags' tensors are the point of it; the rest says which events may happen."""

    weights: dict[str, Tensors]
    device: Tensors  # what the device must hold while awake: the shown tag's weights, or what is being written
    rest: Tensors
    optimizer: Tensors
    grads: Tensors
    version: int  # the number of 'actor', or of what it was before the open phase
    keep: frozenset[Region] = frozenset()
    shown: str | None = ACTOR  # None while asleep, and after a fault
    phase: Phase | None = None
    load: str | None = None
    optimizer_there: bool = True
    rest_there: bool = True
    backward_left: bool = False
    discarded: set[str] = field(factory=set)
    safe: bool = False  # nothing was trained or written since a sleep: an aborted phase can be restored
    copied: bool = False  # the device has shown nothing new since a sleep or a sync of host copies
    published: int | None = None

    @property
    def contents(self) -> Contents:
        return Contents(self.device, self.rest, self.optimizer, self.grads)

    @property
    def leftover(self) -> bool:
        """A step outside a phase raised: the next event ends what it began."""
        return self.phase is not None and self.phase.implicit

    def may(self, event: str, tag: str | None, of: str | None, reading: bool, scopes: bool) -> bool:
        """Whether it may happen. ``reading``: a ``weights()`` block reads the device; ``scopes``: one is open."""
        awake, quiet = self.shown is not None, self.phase is None and self.load is None
        still = quiet and not reading
        match event:
            case "sleep":
                return not awake or (still and not scopes and not (self.backward_left and bool(self.grads)))
            case "wake_up":
                return not awake or tag == self.shown
            case "switch":
                return awake and (still or tag == self.shown == ACTOR)
            case "begin_training":
                return self.shown == ACTOR and still
            case "end_training" | "abort_training":
                return self.phase is not None and not reading
            case "discard_grads":
                return self.shown == ACTOR and self.phase is None
            case "tag":
                hidden = tag not in (ACTOR, self.shown)
                return hidden and not (of == ACTOR and self.phase is not None)
            case "load" | "adopt":
                return awake and still
            case "sync":
                return quiet
            case "recover":
                return False
        raise AssertionError(event)

    # what has come about

    def take(self, contents: Contents) -> None:
        self.device, self.rest = contents.weights, contents.rest
        self.optimizer, self.grads = contents.optimizer, contents.grads

    def show(self, tag: str) -> None:
        self.shown, self.device = tag, self.weights[tag]
        self.rest_there = True
        self.optimizer_there |= tag == ACTOR

    def sleep(self) -> None:
        self.shown = None
        if Region.GRADS not in self.keep:
            self.drop_grads()
        self.optimizer_there &= Region.OPTIMIZER in self.keep
        self.rest_there &= Region.REST in self.keep
        self.safe, self.copied = Region.OPTIMIZER not in self.keep, True

    def drop_grads(self) -> None:
        self.backward_left &= not self.grads
        self.discarded |= set(self.grads)
        self.grads = {}

    def begin_phase(self, implicit: bool = False) -> None:
        """Gradients that were discarded come back as zeros, but not for a step outside a phase."""
        base = Contents(self.device, self.rest, self.optimizer)
        self.phase = Phase(base, self.version, implicit)
        if not implicit:
            zeros = {name: torch.zeros_like(self.device[name]) for name in self.discarded}
            self.grads, self.discarded = {**zeros, **self.grads}, set()

    def trained(self) -> None:
        assert self.phase is not None
        self.phase = evolve(self.phase, trained=True)

    def end_phase(self, contents: Contents, version: int) -> None:
        """``contents``: what the phase has left; the rest and the gradients stay as they are."""
        assert self.phase is not None
        self.safe &= contents is self.phase.base
        self.copied &= version == self.phase.version
        self.weights[ACTOR] = self.device = contents.weights
        self.optimizer, self.version = contents.optimizer, version
        self.phase, self.backward_left = None, False

    def wrote(self, tag: str, weights: Tensors) -> None:
        """The tag has new weights, which came from outside."""
        self.weights[tag] = weights
        if tag == self.shown:
            self.device = weights
            self.safe = self.copied = False
