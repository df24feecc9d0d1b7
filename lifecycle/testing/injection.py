"""Making an effect of a real controller fail, before it acts or after it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from lifecycle.actions import Action, Call
from lifecycle.versions import Facts

if TYPE_CHECKING:
    from lifecycle.controller import ActorLifecycle


class Injected(RuntimeError):
    """The failure that ``failing`` raises unless it is given another."""


@define
class Watch:
    """Which effects ran, and which of them were made to fail, in order."""

    ran: list[str] = field(factory=list)
    failed: list[str] = field(factory=list)


@contextmanager
def failing(
    actor: ActorLifecycle,
    effects: Collection[str] | str = (),
    when: Literal["before", "after"] = "before",
    error: Callable[[], BaseException] = Injected,
) -> Iterator[Watch]:
    """Inside, each of these effects raises once for each of its actions. With no effects it only watches."""
    wanted = {effects} if isinstance(effects, str) else set(effects)
    watch, world = Watch(), actor._world
    perform = world.perform

    def sabotaged(action: Action, facts: Facts, call: Call) -> tuple[Any, int]:
        effect = actor.moving[1] if actor.moving is not None else ""
        watch.ran.append(effect)
        if effect not in wanted:
            return perform(action, facts, call)
        if when == "after":
            perform(action, facts, call)
        watch.failed.append(effect)
        raise error()

    world.perform = sabotaged  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        world.perform = perform  # type: ignore[method-assign]
