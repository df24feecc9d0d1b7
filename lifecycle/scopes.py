"""Blocks that show or read a version inside: ``using``, ``hold`` and ``weights``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from attrs import evolve

from lifecycle import versions as v
from lifecycle.errors import LifecycleError
from lifecycle.gate import HookGate
from lifecycle.versions import ACTOR, Scope

if TYPE_CHECKING:
    from torch import Tensor


class Scopes(HookGate):
    """Scopes go to a tag and back by the table's own rows; a reader holds a lease on what it reads."""

    @contextmanager
    def using(self, tag: str) -> Iterator[Self]:
        """Show the tag inside, and go back to what was shown on leaving. Nested uses of one tag move nothing."""
        scope = self._enter_scope(tag)
        try:
            yield self
        except BaseException as error:
            self._leave_scope_after(scope, error)
            raise
        self._leave_scope(scope)

    @contextmanager
    def hold(self) -> Iterator[Self]:
        """Awake and restored inside; leaving the outermost scope goes back to sleep if it was asleep."""
        with self.using(ACTOR):
            yield self

    @contextmanager
    def weights(self, tag: str = ACTOR) -> Iterator[Mapping[str, Tensor]]:
        """Name to tensor, views of the tag's readable copy, leased while inside. Read-only by contract.

        In any state but FAULTED and CLOSED. Raises NoReadableCopy.
        """
        lease = None
        try:
            with self._exclusive("weights"):
                self._known("weights", tag)
                if self._at_rest():
                    self._arrive()
                self.permit("weights")
                where = v.sources(self.facts, tag)
                facts, lease = v.leased(self.facts, self.facts.tags[tag], where, "weights")
                views = self._world.read(facts, lease)
                self._executor.facts = facts
            yield views
        finally:
            if lease is not None:
                with self._exclusive("weights", wait=True):
                    self._executor.facts = v.released(self.facts, lease.id)
                    self._forget_unreferenced()

    def _enter_scope(self, tag: str) -> Scope:
        scope = None
        try:
            with self._exclusive("using"):
                self._known("using", tag)
                back = self._machine.state
                self._go(tag)
                self._arrive()
                scope = Scope(self.facts.next_id, tag, back)
                self._executor.facts = evolve(self.facts, scopes=(*self.facts.scopes, scope), next_id=scope.id + 1)
            return scope
        except BaseException as error:
            if scope is not None:  # an interrupt that was held back until now
                self._leave_scope_after(scope, error)
            raise

    def _go(self, tag: str) -> None:
        """By the verb that leads there from a state that shows nothing, or shows something else."""
        shown = self._table.shown[self._machine.state]
        if shown is None:
            self._step("wake_up", tag=tag)
        elif shown != tag or not self._at_rest():
            self._step("switch", tag=tag)

    def _leave_scope(self, scope: Scope) -> None:
        """The innermost goes back to where it began; one left out of order (threads) hands its beginning on."""
        with self._exclusive("using", wait=True):
            scopes = self.facts.scopes
            place = next(n for n, held in enumerate(scopes) if held.id == scope.id)
            innermost = place == len(scopes) - 1
            rest = list(scopes[:place] + scopes[place + 1 :])
            if not innermost:
                rest[place] = evolve(rest[place], back=scopes[place].back)
            self._executor.facts = evolve(self.facts, scopes=tuple(rest))
            shown = self._table.shown[self._machine.state]
            if innermost and shown is not None and self._at_rest():
                self._go_back(shown, self._table.shown[scopes[place].back])

    def _go_back(self, shown: str, before: str | None) -> None:
        if before is None:
            self._step("sleep")
        elif before != shown:
            self._step("switch", tag=before)

    def _leave_scope_after(self, scope: Scope, error: BaseException) -> None:
        try:
            self._leave_scope(scope)
        except LifecycleError as second:
            error.add_note(f"leaving the scope failed too: {second}")
