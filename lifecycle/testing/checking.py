"""What must hold after whatever was done with a driven actor; see ``lifecycle.testing.stateful``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lifecycle import ActorLifecycle
from lifecycle.errors import Faulted
from lifecycle.testing.driving import ALL, POISON, REGIONS, Driver
from lifecycle.testing.subjects import bits, different_names
from lifecycle.versions import ACTOR, lost_tags
from states.resources import Copy


class Checking(Driver):
    """Compares state, books, tags and device with what is expected, and asks for what must be refused."""

    def check(self) -> None:
        self.check_state()
        self.check_books()
        if not self.actor.state.arriving or self.age % 4 == 3:  # else what comes next finds bytes on their way
            self.check_tags()
            self.check_device()
            self.check_refusals()
        self.age += 1

    def check_state(self) -> None:
        actor, shown = self.actor, self.expected.shown
        assert actor.moving is None
        assert len(actor.facts.scopes) == len(self.scopes)
        if self.faulted:
            assert actor.state.name == "FAULTED"
            return
        assert self.state == ("ASLEEP" if shown is None else "RESIDENT" if shown == ACTOR else f"SWITCHED({shown})")
        assert (actor.facts.phase is not None) == (self.expected.phase is not None)
        assert (actor.facts.load is not None) == (self.expected.load is not None)
        assert self.expected.phase is not None or actor.tags[ACTOR] == self.expected.version
        assert actor.facts.published == self.expected.published

    def check_tags(self) -> None:
        """Whatever the state, every tag's weights can be read, unless they are being written."""
        for tag in () if self.faulted else ALL:
            if tag != ACTOR or self.expected.phase is None:
                with self.actor.weights(tag) as views:
                    assert not (wrong := different_names(views, self.expected.weights[tag])), (tag, wrong)
        for reader in self.readers:
            assert not different_names(reader.views, reader.content)

    def check_device(self) -> None:
        """The device holds what the state says, and nothing of what was released can be read."""
        expected, subject = self.expected, self.subject
        assert self.structure == subject.structure()
        if self.faulted:
            return
        live = subject.contents()
        assert not (wrong := different_names(live.grads, expected.grads)), wrong
        for got, wanted, there in (
            (live.weights, expected.device, expected.shown is not None),
            (live.rest, expected.rest, expected.rest_there),
            (live.optimizer, expected.optimizer, expected.optimizer_there),
        ):
            if there:
                assert not (wrong := different_names(got, wanted)), wrong
            elif expected.shown is None:
                assert all(set(bits(tensor)) <= {POISON} for tensor in got.values())

    def check_books(self) -> None:
        """Facts, buffers and mappings agree."""
        facts, world = self.actor.facts, self.actor._world
        if self.faulted:
            return
        working = {ACTOR} if facts.phase is not None else set()
        assert set(lost_tags(facts)) <= working
        assert facts.resident & REGIONS == self.arena.resident() & REGIONS
        held = {part for part in facts.copies if facts.parts[part].nbytes}
        assert {part for part, buffer in world.buffers.items() if buffer.nbytes} == held
        assert world.pool.in_use == len(world.buffers)
        for lease in facts.leases:
            assert {part for part, place in lease.sources.items() if place is not Copy.DEVICE} <= facts.copies.keys()
        if self.adapter is not None:
            assert self.adapter.groups == facts.groups_up == (self.expected.shown is not None)

    def check_refusals(self) -> None:
        """What would be refused is what must be; asking changes nothing. A few events each time, in turn."""
        before, moved = self.seen(), self.moved()
        if self.faulted:
            assert isinstance(self.attempt(_FAULTED_EVENTS[self.age % len(_FAULTED_EVENTS)](self.actor)), Faulted)
        elif not self.expected.leftover:  # that would end first
            for number in range(4 * self.age, 4 * self.age + 4):
                event, *arguments = _QUESTIONS[number % len(_QUESTIONS)]
                plan = self.actor.plan(event, *arguments)
                assert (plan.refusal is None) == self.may(event, *arguments), (event, arguments, plan.refusal)
            self.check_state_dicts()
        assert (self.seen(), self.moved()) == (before, moved)

    def check_state_dicts(self) -> None:
        """A plain state dict is what the device must hold, or it is refused."""
        expected, subject = self.expected, self.subject
        saved: list[Mapping[str, Any]] = []
        if self.ask(
            lambda: saved.append(subject.model.state_dict()), expected.shown == ACTOR or expected.load is not None
        ):
            assert not different_names(saved[0], expected.device)
        self.ask(subject.optimizer.state_dict, expected.shown is not None and expected.optimizer_there)


_QUESTIONS = (
    *((event,) for event in ("sleep", "begin_training", "end_training", "abort_training", "discard_grads", "adopt")),
    *((event, tag) for event in ("wake_up", "switch", "load") for tag in (*ALL, "nobody")),
    *(("tag", tag, of) for tag in ALL for of in ALL),
)
_FAULTED_EVENTS: tuple[Callable[[ActorLifecycle], Callable[[], object]], ...] = (
    lambda actor: actor.sleep,
    lambda actor: actor.wake_up,
    lambda actor: lambda: actor.switch("ref"),
    lambda actor: actor.begin_training,
    lambda actor: actor.end_training,
    lambda actor: lambda: actor.tag("ref", "old"),
    lambda actor: actor.hold().__enter__,
    lambda actor: actor.weights().__enter__,
    lambda actor: actor.adopt,
)
