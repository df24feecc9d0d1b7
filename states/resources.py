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


class Fact(StrEnum):
    """What can be true of an actor. States hold or lack facts, effects need, give and take them, guards ask for them.

    The facts up to ``HOOKS`` describe resources: contracts and effects are written in them. Those up to ``ROTATED`` are
    *progress*: what an event has done so far, so that effects can say what must have come before them; they end with
    the event. The rest are conditions of one call, observed when an event is asked for; only guards use them.
    """

    # regions mapped on the device
    WEIGHTS = "weights mapped"
    GRADS = "gradients present"
    OPTIMIZER = "optimizer mapped"
    WORKSPACES = "workspaces present"
    REST = "rest mapped"
    # valid contents of what is mapped
    VERSION_SHOWN = "device holds the version of the state's tag, or it is on its way there, unless a load is open"
    OPTIMIZER_VALID = "optimizer state valid on the device"
    REST_VALID = "rest valid on the device"
    # copies elsewhere
    VERSIONS_COPIED = "every referenced part the device may lose has another copy"
    BACKUPS_COPIED = "optimizer state and rest have another copy"
    # open business
    WORKING = "a training phase is open"
    LOADING = "a load is open"
    ARRIVING = "weights are on their way to the device"
    OPTIMIZER_ARRIVING = "optimizer state is on its way to the device"
    HALF_MOVED = "a part is half in its copy and half on the device"
    GROUPS = "process groups up"
    SYNC_GROUPS = "process groups raised for a sync alone"
    SOURCE_LEASED = "sync source leased"
    ENGINES_PAUSED = "engines paused by the sync"
    UPDATE_OPEN = "engines hold a half-received update"
    HOOKS = "hooks installed"
    # what this event has done so far
    SETTLED = "writers and copies in flight have ended"
    CHECKED = "structure checked"
    VERIFIED = "device bytes compared with their version"
    OPTIMIZER_ADOPTED = "optimizer state that has appeared is taken over"
    AGREED = "all ranks go on"
    COLLECTED = "dropped memory returned to the system"
    GROUPS_READY = "process groups are up for the sync"
    SURVIVORS_COPIED = "what the device alone held has a copy"
    GRADS_READY = "gradients that a sleep discarded are back"
    TAG_MOVED = "the tag points where it was to point"
    WEIGHTS_ADOPTED = "what the device holds is a version"
    STATE_READ = "what is there has been measured"
    CONNECTED = "a transport is chosen for every engine"
    CACHES_FLUSHED = "engines have dropped what was derived from old weights"
    ENGINES_CHECKED = "fingerprints in the engines compared with the version's"
    UPDATES_ENDED = "no engine has an update open, and none that saw a byte holds a version"
    OTHERS_CONTINUE = "engines that saw no byte go on"
    PUBLISHED = "the version is the published one"
    ROTATED = "tags that rotate after the sync have moved"

    # conditions of one call
    SCOPE_OPEN = "a scope is open"
    BACKWARD_LEFT = "gradients of a backward outside a phase are left"
    DEVICE_LEASED = "device weights are being read"
    LEASED = "weights are being read, wherever they are"
    MEMORY_SHORT = "free memory is too little"
    GRAPHS_PIN_ADDRESSES = "captured graphs would read moved memory"
    TAG_IS_ACTOR = "the tag is 'actor'"
    TAG_IS_SHOWN = "the device shows the tag"
    OF_WORKING = "the other tag points at a working version"
    ROTATES_SHOWN = "a rotation would move 'actor' or the tag that the device shows"
    NO_OPTIMIZER = "no optimizer is attached"
    TARGET_HELD = "the device holds the tag's version already"
    WEIGHTS_LOST = "the weights region is released"


#: A fact of this file, or one of a machine's own: a member of any StrEnum. Facts are told apart by their text.
AnyFact = StrEnum

_ALL = list(Fact)
PROGRESS = frozenset(_ALL[_ALL.index(Fact.SETTLED) : _ALL.index(Fact.SCOPE_OPEN)])
CONDITIONS = frozenset(_ALL[_ALL.index(Fact.SCOPE_OPEN) :])
