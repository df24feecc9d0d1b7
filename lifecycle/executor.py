"""Runs one row's effects, undoes them when one fails, and says what is left.

Theory of operation. Effects run in the table's order. Before an effect that has an inverse starts, the inverse is put
on a stack, so that it is also run for an effect that stopped half-way; inverses are idempotent and find out from the
facts what there is to undo. On any exception the stack is run in reverse; an inverse that raises is noted and the
unwinding goes on. If an effect without an inverse had begun, or an inverse failed, the result is not "the old state,
hopefully": it is a fault, and the controller moves to FAULTED. Facts are updated after every single action, so that
whatever happens they tell the truth.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, takewhile
from types import FrameType
from typing import Any, Protocol

from attrs import define, field, frozen

from lifecycle.actions import Action, Call, Probe
from lifecycle.asking import asked_once
from lifecycle.errors import VerificationFailed
from lifecycle.journal import Journal
from lifecycle.outcome import Settings, after, during, looked_again, refuted
from lifecycle.plan import PlannedEffect
from lifecycle.traffic import Traffic, avoided_bytes
from lifecycle.versions import Facts
from lifecycle.work import WORK, actions
from states.resources import SLOT_REGION
from states.spec import Effect, FlatRow

_MAPPING = ("resume_actor_regions", "resume_forward_regions")


class World(Probe, Protocol):
    """The only thing that touches memory, buffers, gradients, groups and engines."""

    def perform(self, action: Action, facts: Facts, call: Call) -> tuple[Any, int]:
        """Do it. Returns what ``after`` needs to know, and the bytes really moved."""
        ...

    def foresee(self, todo: Iterable[Action], facts: Facts) -> None:
        """These actions come soon, if nothing fails before: of what shows nowhere, what takes long may begin now.

        Told of the same row again, with more that comes behind them.
        """
        ...

    def left_undone(self, effect: str, call: Call) -> None:
        """The effect has nothing to do; where that is worth a word, say why."""
        ...

    def catch_up(self, facts: Facts) -> None:
        """Wait for what earlier actions of this row have left to later ones."""
        ...

    def finish(self, facts: Facts) -> None:
        """No action follows in this row: as ``catch_up``, and what was begun ahead and not asked for is not wanted."""
        ...

    def give_up(self) -> None:
        """The row has failed: what was begun ahead, or left to later actions, is not wanted any more."""
        ...

    def settings(self) -> Settings: ...


@frozen
class Failure:
    """How a row ended that did not reach its target."""

    effect: str
    cause: BaseException
    rolled_back: bool


class EffectStopped(Exception):
    """Carries a Failure out of the running machine, which then keeps its source state."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.effect)
        self.failure = failure


@define
class Executor:
    """Holds the facts while a row runs; ``moving`` and ``facts`` may be read from any thread."""

    world: World
    journal: Journal
    facts: Facts
    effects: Mapping[str, Effect]  # all of the machine, by name
    moving: tuple[str, str] | None = None
    traffic: Traffic = field(factory=Traffic)

    def run(self, row: FlatRow, call: Call, planned: tuple[PlannedEffect, ...]) -> None:
        """All effects of the row, in order. Raises EffectStopped, after unwinding."""
        self.traffic.avoided += avoided_bytes(self.facts, call)
        if not planned:
            return
        inverses: list[str] = []
        committed_to = False  # whether a point of no return has been passed
        name, left_open, asked = "", "", asked_once(self.world)
        try:
            self.world.foresee(_copies_ahead(planned), self.facts)
            for effect in row.effects:
                name = effect.name
                todo = actions(effect, self.facts, call, asked)
                if not todo:
                    self.world.left_undone(name, call)
                    continue
                if left_open and effect.name not in WORK:  # others' own: it finds everything as the effects have it
                    name = left_open
                    self.world.catch_up(self.facts)
                    name = effect.name
                if not effect.undoable and not committed_to:
                    committed_to = True
                    self.journal.add(
                        "intent", call.event, tag=call.tag, effect=name, source=row.source, target=row.target
                    )
                if effect.inverse is not None:
                    inverses.append(effect.inverse)
                self._do(name, todo, call)
                asked = asked_once(self.world)
                if not left_open and any(action.late for action in todo):
                    left_open = name
            name = left_open or name
            self.world.finish(self.facts)
        except BaseException as cause:
            self.world.give_up()
            self.look_again(syncing=call.event == "start_sync")
            undone = self._unwind(inverses, call, cause)
            raise EffectStopped(Failure(name, cause, undone and not committed_to)) from cause
        finally:
            self.moving = None

    @contextmanager
    def foreseen(self, row: FlatRow, call: Call, probe: Probe) -> Iterator[None]:
        """Memory that the row takes back may be begun with, where nothing before it changes anything, as far as it is
        known here; whatever fails gives it up."""
        try:
            for effect in row.effects:
                if effect.name not in WORK:
                    break
                if effect.name in _MAPPING:
                    self.world.foresee(actions(effect, self.facts, call, probe), self.facts)
                if not effect.harmless:
                    break
            yield
        except BaseException:
            self.world.give_up()
            raise

    def look_again(self, syncing: bool = False) -> None:
        """Take over from the world what a failed effect may have done all the same."""
        world = self.world
        groups_up = world.groups_up() if world.has_groups() else self.facts.groups_up
        self.facts = looked_again(self.facts, world.mapped(), groups_up, syncing)

    def _do(self, effect: str, todo: tuple[Action, ...], call: Call) -> None:
        self.moving = (call.event, effect)
        for action in todo:
            self.facts = during(self.facts, action)
            began = time.perf_counter()
            try:
                result, moved = self.world.perform(action, self.facts, call)
            except VerificationFailed:
                self.facts = refuted(self.facts, action)
                raise
            seconds = time.perf_counter() - began
            self.facts = after(self.facts, action, result, call, self.world.settings())
            self._note(effect, action, call, moved, seconds)

    def _note(self, effect: str, action: Action, call: Call, moved: int, seconds: float) -> None:
        if action.direction is not None:
            assert action.slot is not None
            self.traffic.count(action.direction, region_of(action), moved)
        self.journal.add(
            "effect",
            call.event,
            tag=action.tag or call.tag,
            effect=effect,
            slot=action.slot,
            region=region_of(action) or None,
            version=_version_of(self.facts, action),
            part=action.part,
            nbytes=moved,
            direction=action.direction,
            seconds=seconds,
            note=action.engine or "",
        )

    def _unwind(self, inverses: list[str], call: Call, cause: BaseException) -> bool:
        """Run the inverses in reverse; whether all succeeded."""
        clean = True
        for name in reversed(inverses):
            try:
                self._do(name, actions(self.effects[name], self.facts, call, self.world), call)
            except BaseException as error:
                clean = False
                self.look_again()
                cause.add_note(f"undoing by {name} failed: {type(error).__name__}: {error}")
        return clean


def _copies_ahead(planned: Iterable[PlannedEffect]) -> Iterator[Action]:
    """What comes if nothing fails, up to an effect of others' own, which may read or write whatever it likes."""
    known = takewhile(lambda effect: effect.name in WORK, planned)
    return chain.from_iterable(effect.actions for effect in known if effect.name not in _MAPPING)


def region_of(action: Action) -> str:
    if action.region is not None:
        return action.region.value
    return SLOT_REGION[action.slot].value if action.slot is not None else ""


def _version_of(facts: Facts, action: Action) -> int | None:
    """The newest version that the moved part belongs to."""
    if action.part is None:
        return None
    found = [v.id for v in facts.versions.values() if action.part in v.parts.values()]
    return max(found, default=None)


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back and deliver it at the end, to whoever handled it before, or when the callable is called.

    In other threads it never arrives, and a handler that was not installed from Python is left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if arrived:
            told = arrived[-1]
            arrived.clear()
            if callable(handler):
                handler(*told)
            else:  # ignored, or the end of the process
                signal.signal(signal.SIGINT, handler)
                signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
