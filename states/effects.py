"""The effect catalogue: what each step needs, forbids, gives and takes, and how it is undone.

Effects are idempotent: each acts only where there is something to do, so a row lists all that may be needed and the
plan names what will be. An inverse is also run for an effect that stopped half-way.
"""

from __future__ import annotations

from states.resources import Fact
from states.spec import Effect
from states.sync_effects import SYNC_EFFECTS

EFFECTS: tuple[Effect, ...] = (
    # looking, before anything is touched
    Effect(
        "settle_writers",
        "Wait for asynchronous checkpoint writers and copies in flight.",
        gives=[Fact.SETTLED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "check_structure",
        "Compare the model with its manifest: added, removed, replaced, re-tied, cast, reshaped.",
        needs=[Fact.HOOKS],
        gives=[Fact.CHECKED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "verify_weights",
        "Compare the device's fingerprint with the version's, where this event destroys or publishes it.",
        needs=[Fact.WEIGHTS, Fact.VERSION_SHOWN, Fact.CHECKED],
        gives=[Fact.VERIFIED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "check_copies",
        "Make sure that every tag has a complete copy off the device.",
        needs=[Fact.SURVIVORS_COPIED],
        gives=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED],
        harmless=True,
    ),
    # copies
    Effect(
        "copy_out_weights",
        "Copy to the host those parts that this event may overwrite or needs there and that have no copy, but for "
        "those that are exchanged.",
        needs=[Fact.WEIGHTS, Fact.VERSION_SHOWN, Fact.VERIFIED],
        gives=[Fact.VERSIONS_COPIED],
        harmless=True,  # a valid copy more breaks nothing; a half-made one is never recorded
        refuses=True,
    ),
    Effect(
        "adopt_optimizer_state",
        "Take over the memory of optimizer state that has appeared.",
        needs=[Fact.CHECKED],
        forbids=[Fact.VERIFIED],
        gives=[Fact.OPTIMIZER_ADOPTED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "back_up_regions",
        "Copy to the host the optimizer state and the rest, where changed since their last copy.",
        needs=[Fact.OPTIMIZER_ADOPTED],
        gives=[Fact.BACKUPS_COPIED],
        harmless=True,
        refuses=True,
    ),
    Effect(
        "agree", "All ranks agree to go on; on one rank there is nothing to do.", gives=[Fact.AGREED], harmless=True
    ),
    # releasing
    Effect(
        "drop_workspaces",
        "Drop cached pure functions of the weights. Never under captured graphs (radixark/miles#2142).",
        takes=[Fact.WORKSPACES],
        needs=[Fact.AGREED],
    ),
    Effect(
        "discard_grads",
        "Drop the gradients; they come back as zeros.",
        forbids=[Fact.WORKING],
        takes=[Fact.GRADS],
    ),
    Effect(
        "collect_memory",
        "Return dropped memory to the system.",
        forbids=[Fact.GRADS],
        gives=[Fact.COLLECTED],
        harmless=True,
    ),
    Effect(
        "suspend_groups",
        "Take process groups down, in the same order on every rank.",
        needs=[Fact.AGREED, Fact.COLLECTED],
        takes=[Fact.GROUPS],
        inverse="reload_groups",
    ),
    Effect(
        "pause_regions",
        "Release the memory of the regions.",
        needs=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED, Fact.SETTLED, Fact.COLLECTED, Fact.AGREED],
        forbids=[
            Fact.WORKING,
            Fact.LOADING,
            Fact.WORKSPACES,
            Fact.GRADS,
            Fact.GROUPS,
            Fact.ARRIVING,
            Fact.OPTIMIZER_ARRIVING,
        ],
        takes=[Fact.WEIGHTS, Fact.OPTIMIZER, Fact.REST, Fact.VERSION_SHOWN, Fact.OPTIMIZER_VALID, Fact.REST_VALID],
        fatal=True,
    ),
    # taking back
    Effect(
        "resume_actor_regions",
        "Map weights, optimizer and rest again.",
        needs=[Fact.AGREED],
        gives=[Fact.WEIGHTS, Fact.OPTIMIZER, Fact.REST],
        inverse="pause_resumed",
        fatal=True,
    ),
    Effect(
        "resume_forward_regions",
        "Map weights and rest again: what a forward needs.",
        needs=[Fact.AGREED],
        gives=[Fact.WEIGHTS, Fact.REST],
        inverse="pause_resumed",
        fatal=True,
    ),
    Effect("pause_resumed", "Release again what this event had mapped.", harmless=True, fatal=True),
    Effect(
        "reload_groups",
        "Bring process groups back.",
        needs=[Fact.WEIGHTS],
        gives=[Fact.GROUPS],
        inverse="suspend_groups",
    ),
    Effect(
        "restore_rest",
        "Copy the rest back, where the device does not hold it.",
        needs=[Fact.REST, Fact.GROUPS],
        gives=[Fact.REST_VALID],
        harmless=True,
    ),
    Effect(
        "restore_optimizer",
        "Copy the optimizer state back, where the device does not hold it.",
        needs=[Fact.OPTIMIZER, Fact.VERSION_SHOWN],
        gives=[Fact.OPTIMIZER_VALID],
        harmless=True,
    ),
    Effect(
        "restore_weights",
        "Copy the parts of the tag's version that the device does not hold.",
        needs=[Fact.WEIGHTS, Fact.VERSIONS_COPIED, Fact.AGREED, Fact.REST_VALID],
        forbids=[Fact.WORKING],
        gives=[Fact.VERSION_SHOWN],
        inverse="restore_shown",
    ),
    Effect(
        "exchange_weights",
        "Copy out and in at once, chunk by chunk, what the device holds alone and what it is to hold; while it is half "
        "moved a part is the union of its chunks.",
        needs=[Fact.WEIGHTS, Fact.VERSION_SHOWN, Fact.VERIFIED, Fact.AGREED],
        forbids=[Fact.WORKING, Fact.LOADING, Fact.ARRIVING, Fact.HALF_MOVED],
        inverse="restore_shown",
    ),
    Effect(
        "restore_shown",
        "Complete the copy of what was half moved, and copy back the version that the state shows.",
        needs=[Fact.WEIGHTS],
        gives=[Fact.VERSION_SHOWN],
        takes=[Fact.HALF_MOVED],
    ),
    Effect(
        "await_weights",
        "Wait for weights on their way, and compare them with their version.",
        needs=[Fact.WEIGHTS, Fact.VERSION_SHOWN],
        takes=[Fact.ARRIVING],
    ),
    Effect(
        "await_optimizer",
        "Wait for optimizer state on its way, and compare it with what was copied out.",
        needs=[Fact.OPTIMIZER, Fact.OPTIMIZER_VALID],
        takes=[Fact.OPTIMIZER_ARRIVING],
    ),
    # training
    Effect(
        "open_phase",
        "'actor' points at a working version that lives on the device alone.",
        needs=[
            Fact.VERSION_SHOWN,
            Fact.OPTIMIZER_VALID,
            Fact.VERIFIED,
            Fact.VERSIONS_COPIED,
            Fact.AGREED,
            Fact.OPTIMIZER_ADOPTED,
            Fact.GRADS_READY,
        ],
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.WORKING],
        takes=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED],
        harmless=True,  # the last effect of its rows: it has either opened the phase or changed nothing
    ),
    Effect(
        "zero_grads",
        "Gradients that a sleep discarded come back as zeros; where none was, none comes.",
        needs=[Fact.AGREED],
        gives=[Fact.GRADS_READY],
        harmless=True,
    ),
    Effect(
        "freeze_version",
        "Fingerprint the working version and give it its number.",
        needs=[Fact.WORKING, Fact.CHECKED, Fact.AGREED, Fact.OPTIMIZER_ADOPTED],
        gives=[Fact.VERSION_SHOWN],
        takes=[Fact.WORKING],
        harmless=True,  # the last effect of its rows: it either has frozen the version or has changed nothing
    ),
    Effect(
        "settle_phase",
        "Decide by fingerprint whether an aborted phase changed anything: the old version again, or a new one.",
        needs=[Fact.WORKING, Fact.AGREED],
        takes=[Fact.WORKING],
        harmless=True,
    ),
    Effect(
        "restore_base",
        "Put back weights and optimizer state from before an aborted phase, where that is wanted and a copy exists.",
        needs=[Fact.WEIGHTS, Fact.OPTIMIZER],
        forbids=[Fact.WORKING],
        gives=[Fact.VERSION_SHOWN, Fact.OPTIMIZER_VALID],
        inverse="restore_shown",
    ),
    # weights from outside
    Effect(
        "open_load",
        "What the device holds from here on is the caller's, to become the tag's new version.",
        needs=[Fact.VERSION_SHOWN, Fact.VERIFIED, Fact.VERSIONS_COPIED, Fact.AGREED],
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.LOADING],
        harmless=True,  # the last effect of its rows
    ),
    Effect(
        "freeze_load",
        "Fingerprint what was written; it is the tag's new version.",
        needs=[Fact.LOADING, Fact.CHECKED, Fact.AGREED],
        takes=[Fact.LOADING, Fact.VERSION_SHOWN],
        gives=[Fact.VERIFIED],
        inverse="reopen_load",
    ),
    Effect(
        "reopen_load",
        "The load is open again while the device holds what was written, and given up where it shows what it showed.",
        gives=[Fact.LOADING],
        harmless=True,
    ),
    Effect(
        "copy_out_loaded",
        "Copy the new version to the host where the device goes back to another one.",
        needs=[Fact.WEIGHTS, Fact.VERIFIED],
        forbids=[Fact.LOADING],
        gives=[Fact.VERSIONS_COPIED],
        harmless=True,
    ),
    Effect(
        "drop_load",
        "Forget what a failed load wrote.",
        needs=[Fact.AGREED, Fact.LOADING],
        gives=[Fact.VERSIONS_COPIED],
        takes=[Fact.LOADING, Fact.VERSION_SHOWN],
        harmless=True,  # open_load had them copied, and nothing else was written since
    ),
    Effect(
        "adopt_weights",
        "What the device holds becomes the shown tag's new version.",
        needs=[Fact.WEIGHTS, Fact.CHECKED, Fact.AGREED],
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.VERSION_SHOWN, Fact.WEIGHTS_ADOPTED],
        harmless=True,
    ),
    Effect(
        "move_tag",
        "The tag points at the other tag's version.",
        needs=[Fact.AGREED],
        gives=[Fact.TAG_MOVED],
        harmless=True,
    ),
    *SYNC_EFFECTS,
    # ends
    Effect(
        "abandon_sync",
        "A sync that was cut off is over: its lease ends, and engines that saw a byte hold no version.",
        takes=[Fact.SOURCE_LEASED, Fact.ENGINES_PAUSED, Fact.UPDATE_OPEN],
    ),
    Effect(
        "read_back",
        "Wait for what is on its way, and measure what is mapped and what the device really holds.",
        forbids=[Fact.SYNC_GROUPS],
        takes=[Fact.ARRIVING, Fact.OPTIMIZER_ARRIVING],
        gives=[Fact.STATE_READ],
        harmless=True,
    ),
    Effect(
        "close_open_business",
        "End an open phase or load: what the device holds is kept as a version where it is whole.",
        takes=[Fact.WORKING, Fact.LOADING],
        needs=[Fact.STATE_READ],
        harmless=True,
    ),
    Effect(
        "copy_out_survivors",
        "Copy to the host what the device alone holds, also of what is half moved.",
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED, Fact.SURVIVORS_COPIED],
        takes=[Fact.HALF_MOVED],
        harmless=True,
    ),
    Effect(
        "copy_out_everything",
        "Copy to the host whatever the device alone holds, since all of it is released next.",
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED, Fact.SURVIVORS_COPIED],
        takes=[Fact.HALF_MOVED],
        harmless=True,
    ),
    Effect(
        "restore_actor",
        "Copy back the actor's version; what the device showed is not needed any more.",
        needs=[Fact.WEIGHTS, Fact.REST_VALID],
        forbids=[Fact.WORKING, Fact.LOADING],
        gives=[Fact.VERSION_SHOWN],
        inverse="restore_shown",
    ),
    Effect(
        "bring_back",
        "Put the actor's weights back on the device as far as possible.",
        forbids=[Fact.SYNC_GROUPS, Fact.WORKING, Fact.LOADING],
        gives=[Fact.VERSION_SHOWN],
        takes=[Fact.HALF_MOVED],
        harmless=True,
    ),
    Effect(
        "remove_hooks",
        "Take all hooks off.",
        needs=[Fact.VERSION_SHOWN],
        takes=[Fact.HOOKS],
    ),
    Effect("free_copies", "Give all host buffers back.", takes=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED]),
)
