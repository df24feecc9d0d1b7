"""What the demo can be asked for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen
from attrs.validators import ge, gt, instance_of, optional


class ModelName(StrEnum):
    """The models there are: a real one, and one that is made in a moment."""

    SMOLLM2 = "smollm2"
    TINY = "tiny"


@frozen(kw_only=True)
class DemoOptions:
    """Settings of one run. Raises ValueError or TypeError for a value that can not be used.

    ``lr`` left at None is the model's own. ``tokens`` limits an answer, ``samples`` are drawn in each step, ``kl``
    weighs the divergence from ``ref``, ``output`` is the folder for the files.
    """

    model: ModelName = field(default=ModelName.SMOLLM2, converter=ModelName)
    steps: int = field(default=5, validator=[instance_of(int), ge(1)])
    samples: int = field(default=8, validator=[instance_of(int), ge(2)])
    tokens: int = field(default=24, validator=[instance_of(int), ge(1)])
    lr: float | None = field(default=None, validator=optional(gt(0)))
    kl: float = field(default=0.05, validator=ge(0))
    seed: int = field(default=0, validator=[instance_of(int), ge(0)])
    output: Path = field(default=Path("demo-output"), converter=Path)

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.value, "output": str(self.output)}
