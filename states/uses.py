"""What the training framework may do with its model and optimizer, and where: hooks ask for it."""

from __future__ import annotations

from states.resources import Fact
from states.spec import Use

USES = (
    Use(
        "weights",
        ("RESIDENT", "SWITCHED", "ASLEEP", "SYNCING"),
        "nothing here says which bytes are whose",
        "recover() first.",
        forbids=[Fact.ARRIVING],
    ),
    Use(
        "forward",
        ("RESIDENT", "SWITCHED", "SYNCING"),
        "its weights are not on the device",
        "wake_up() or wake_up(tag) first, or use hold() or using(tag).",
        needs=[Fact.WEIGHTS],
    ),
    Use(
        "backward",
        ("RESIDENT",),
        "only RESIDENT makes gradients: they would be of other weights than those that train, or left behind",
        "Go back to RESIDENT first, and use torch.no_grad() for forwards here.",
    ),
    Use(
        "step",
        ("RESIDENT",),
        "the optimizer would write over other weights than the actor's",
        "wake_up() or switch('actor') first.",
        forbids=[Fact.LOADING, Fact.ARRIVING, Fact.OPTIMIZER_ARRIVING],
    ),
    Use(
        "state_dict",
        ("RESIDENT",),
        "the device does not hold the actor's weights",
        "weights('actor') reads them in every state.",
        forbids=[Fact.ARRIVING],
        or_when=[Fact.LOADING],
    ),
    Use(
        "load_state_dict",
        ("RESIDENT",),
        "it would write over released memory or another tag's weights",
        "Use loading(tag), awake.",
        forbids=[Fact.WORKING, Fact.ARRIVING],
        or_when=[Fact.LOADING],
    ),
    Use(
        "optimizer_state_dict",
        ("RESIDENT", "SWITCHED", "SYNCING"),
        "the optimizer state is not on the device",
        "wake_up() or hold() first.",
        needs=[Fact.OPTIMIZER_VALID],
        forbids=[Fact.OPTIMIZER_ARRIVING],
    ),
    Use(
        "load_optimizer_state_dict",
        ("RESIDENT",),
        "the optimizer state is not on the device, or in use by an open phase",
        "wake_up() first, outside a training phase.",
        forbids=[Fact.WORKING, Fact.OPTIMIZER_ARRIVING],
    ),
)
