"""Asking the world each question once for as long as nothing is done to it."""

from __future__ import annotations

from typing import Any, cast

from lifecycle.actions import Probe


class _Asked:
    """Keeps what it was told. Questions take no arguments, or a slot or a region."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def __getattr__(self, question: str) -> Any:
        """Only for a question that was not asked yet."""
        ask, told = getattr(self._probe, question), dict[tuple[Any, ...], Any]()

        def answer(*about: Any) -> Any:
            if about not in told:
                told[about] = ask(*about)
            return told[about]

        vars(self)[question] = answer
        return answer


def asked_once(probe: Probe) -> Probe:
    """The same answers, each looked for when it is first asked for: some take as long as walking over all tensors.

    Whoever has done something to the world since makes another one.
    """
    return cast(Probe, _Asked(probe))
