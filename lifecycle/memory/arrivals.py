"""Arrivals of backends that copy at once."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from states.resources import Slot


@frozen(eq=False)
class Arrived:
    """An ``Arrival`` that is over; with what was found when it was."""

    found: Mapping[Slot, Mapping[str, str]]

    def order(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> Mapping[Slot, Mapping[str, str]]:
        return self.found
