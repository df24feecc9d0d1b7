"""Settings of one actor's controller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import in_, instance_of

from states.resources import Region

KEEPABLE = frozenset({Region.GRADS, Region.OPTIMIZER, Region.REST})


def _regions(names: Iterable[str]) -> frozenset[Region]:
    known = {region.value: region for region in KEEPABLE}
    names = [names] if isinstance(names, str) else list(names)
    wrong = [name for name in names if str(name) not in known]
    if wrong:
        raise ValueError(f"keep={wrong}: regions that may be kept while asleep are {', '.join(sorted(known))}")
    return frozenset(known[str(name)] for name in names)


def _whole(least: int) -> Callable[[Any, Attribute[int], Any], None]:
    """A number of this or more that fits in 63 bits. True and False are none, though Python counts them as integers."""

    def validate(config: Any, attribute: Attribute[int], value: Any) -> None:
        told = f"{attribute.name}={value!r}: give a whole number, {least} or more, less than 2**63"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{told} (an int, not {type(value).__name__})")
        if not least <= value < 2**63:
            raise ValueError(told)

    return validate


@frozen(kw_only=True)
class LifecycleConfig:
    """How the controller decides where a choice is yours. Raises ValueError (or TypeError) for a value it has no use
    for.

    - ``on_untracked``: weights changed behind the controller's back are refused (UntrackedChange) or adopted as a new
      version.
    - ``on_abort``: a phase that is aborted after it changed something puts back what was there before, where a copy of
      it exists, or keeps the result as a new version.
    - ``when_busy``: while one thread's event runs, another's is refused or waits.
    - ``verify``: fingerprints are compared before weights are destroyed or published and after they are restored:
      always, on a rotating eighth of the tensors, or never.
    - ``memory_margin_bytes``: bytes that must stay free when memory is taken back.
    - ``keep``: regions that stay on the device while the actor sleeps (grads, optimizer, rest).
    - ``journal``: file for JSON lines; ``journal_records``: how many records are kept in memory.
    - ``protect_copies``: host buffers with complete copies are mapped read-only, so that a stray write ends at once.
    - ``rest_on_disk``: folder for copies of the rest; without it they are where the others are.
    - ``drop_workspaces``: what the next forward rebuilds (quantised weights and the like) is dropped by a sleep.
    """

    on_untracked: Literal["refuse", "adopt"] = field(default="refuse", validator=in_(("refuse", "adopt")))
    on_abort: Literal["restore", "keep"] = field(default="restore", validator=in_(("restore", "keep")))
    when_busy: Literal["refuse", "wait"] = field(default="refuse", validator=in_(("refuse", "wait")))
    verify: Literal["always", "sample", "never"] = field(default="always", validator=in_(("always", "sample", "never")))
    memory_margin_bytes: int = field(default=0, validator=_whole(0))
    keep: frozenset[Region] = field(default=frozenset(), converter=_regions)
    journal: str | os.PathLike[str] | None = None
    journal_records: int = field(default=100_000, validator=_whole(1))
    protect_copies: bool = field(default=False, validator=instance_of(bool))
    drop_workspaces: bool = field(default=True, validator=instance_of(bool))
    rest_on_disk: str | os.PathLike[str] | None = None

    @classmethod
    def from_args(cls, namespace: Any) -> LifecycleConfig:
        """From an argparse-like namespace or a mapping, by the options of ``lifecycle.arguments``; what it lacks keeps
        its default.

        A field ``x`` is read from ``lifecycle_x``, or from the option that sets it. Raises ValueError naming the option
        for a value that can not be used and for an option whose machinery does not exist, TypeError for what holds no
        options at all.
        """
        from lifecycle.arguments import settings

        return cls(**settings(namespace))
