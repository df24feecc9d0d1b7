"""The least that one RL step must move between device and host, and what known policies move. ``docs/traffic.md``.

Pure arithmetic over what a step needs. It knows neither the planner nor any counter: it is what they are held against.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from attrs import asdict, field, frozen
from attrs.validators import ge, min_len


@frozen
class Step:
    """One step, from asleep to asleep, on a device with room for one set of weights.

    ``shows``: the contents that have to be on the device, one after the other, by any names; equal names are equal
    contents. The last one is trained where ``trained``. ``weights`` and ``optimizer`` are bytes of one set and of the
    optimizer's state; ``frozen`` are those bytes of the weights that no training changes, equal in all contents.
    """

    weights: int = field(validator=ge(0))
    optimizer: int = field(validator=ge(0))
    shows: tuple[str, ...] = field(validator=min_len(1))
    frozen: int = field(default=0, validator=ge(0))
    trained: bool = True

    def __attrs_post_init__(self) -> None:
        if self.frozen > self.weights:
            raise ValueError(f"frozen={self.frozen} bytes are more than all weights, {self.weights}")


@frozen
class Moved:
    """Bytes from the device to the host, and to it."""

    out: int
    into: int

    @property
    def total(self) -> int:
        return self.out + self.into

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def minimum(step: Step) -> Moved:
    """W weights, F of them frozen, O optimizer bytes, r changes of what is shown, counting the first:

    in = F + r·(W - F) + O, out = (W - F) + O; without training O moves neither way, and nothing goes out.
    """
    changing = step.weights - step.frozen
    shown = len([content for content, _ in groupby(step.shows)])
    trained = 1 if step.trained else 0
    return Moved(
        out=trained * (changing + step.optimizer), into=step.frozen + shown * changing + trained * step.optimizer
    )


def copies_every_time(step: Step) -> Moved:
    """Copies per tag, kept in host memory, restored in full whenever a tag is shown, and once more before training,
    whatever the device holds (published: https://github.com/radixark/miles/pull/3128). No content is compared.

    in = n·W + O for n tags shown, out = W + O.
    """
    return Moved(
        out=step.trained * (step.weights + step.optimizer),
        into=len(step.shows) * step.weights + step.trained * step.optimizer,
    )


def saver_backup(step: Step) -> Moved:
    """The memory saver backs up and restores all that lies in its pools, changed or not: weights and optimizer at every
    pause and resume. The host copies that switches read are made beside that, as in ``copies_every_time``.

    in = W + O + n·W, out = W + (W + O).
    """
    restored, backed_up = len(step.shows) * step.weights, step.trained * step.weights
    pool = step.weights + step.optimizer
    return Moved(out=backed_up + pool, into=pool + restored)


def naive(step: Step) -> Moved:
    """Every model by ``.to("cuda")`` when it is needed and by ``.to("cpu")`` afterwards, the optimizer's state with the
    trained one.

    in = n·W + O, out = n·W + O.
    """
    each = len(step.shows) * step.weights + step.trained * step.optimizer
    return Moved(out=each, into=each)


OURS, EVERY_TIME, SAVER, NAIVE = (
    "ours",
    "copy per tag, restored every time",
    "memory saver's backup, and copies per tag",
    ".to() there and back",
)
POLICIES = {OURS: minimum, EVERY_TIME: copies_every_time, SAVER: saver_backup, NAIVE: naive}
