"""The words of the machine: regions, policies, parts, copies, resources and conditions.

Nothing here acts. Every other file, the diagrams and the reference pages use these words with this one meaning.
"""

from __future__ import annotations

from enum import StrEnum


class Region(StrEnum):
    """A kind of device memory that is released and taken back as a whole."""

    WEIGHTS = "weights"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    WORKSPACES = "workspaces"
    REST = "rest"


class Policy(StrEnum):
    """What a sleep does with the bytes of a region."""

    VERSIONED = "versioned"  # parts of numbered versions: copied out only where no other copy exists
    BACKED_UP = "backed_up"  # one current content: copied out when it changed since its last copy
    DISCARDED = "discarded"  # worthless outside a training phase: comes back as zeros
    DROPPED = "dropped"  # a pure function of the weights: rebuilt by its owner when next needed
    KEPT = "kept"  # stays on the device while the actor sleeps


POLICIES: dict[Region, Policy] = {
    Region.WEIGHTS: Policy.VERSIONED,
    Region.GRADS: Policy.DISCARDED,
    Region.OPTIMIZER: Policy.BACKED_UP,
    Region.WORKSPACES: Policy.DROPPED,
    Region.REST: Policy.BACKED_UP,
}


class Slot(StrEnum):
    """A place on the device that holds one part at a time."""

    FROZEN = "frozen"
    TRAINED = "trained"
    STATE = "state"
    OPTIMIZER = "optimizer"
    REST = "rest"


#: Region of each slot. The three slots of ``weights`` together hold one version.
SLOT_REGION: dict[Slot, Region] = {
    Slot.FROZEN: Region.WEIGHTS,
    Slot.TRAINED: Region.WEIGHTS,
    Slot.STATE: Region.WEIGHTS,
    Slot.OPTIMIZER: Region.OPTIMIZER,
    Slot.REST: Region.REST,
}

VERSION_SLOTS = (Slot.FROZEN, Slot.TRAINED, Slot.STATE)
BACKUP_SLOTS = (Slot.OPTIMIZER, Slot.REST)


class Copy(StrEnum):
    """Where readable bytes of a part are, from the most to the least direct."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    MASTER = "master"
