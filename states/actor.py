"""THE table: the life cycle of a training actor. Every state change of the running machine is a row of it.

Order inside a row is the field's experience: writers settle before memory moves, copies are complete before a region is
paused, workspaces and gradients go before process groups, groups before memory; coming back is the mirror image.
"""

from __future__ import annotations

from states.effects import EFFECTS
from states.resources import Fact
from states.spec import ORIGIN, SAME, Advice, Event, Guard, MachineSpec, Match, Row, State, Use

_NO_SYNC = (Fact.SYNC_GROUPS, Fact.SOURCE_LEASED, Fact.ENGINES_PAUSED, Fact.UPDATE_OPEN)

STATES = (
    State(
        "RESIDENT",
        "The device holds what 'actor' points at. The only state that trains.",
        holds=[
            Fact.WEIGHTS,
            Fact.OPTIMIZER,
            Fact.REST,
            Fact.VERSION_SHOWN,
            Fact.OPTIMIZER_VALID,
            Fact.REST_VALID,
            Fact.GROUPS,
            Fact.HOOKS,
        ],
        lacks=_NO_SYNC,
    ),
    State(
        "SWITCHED",
        "The device holds another tag's version: forward only.",
        holds=[Fact.WEIGHTS, Fact.REST, Fact.VERSION_SHOWN, Fact.REST_VALID, Fact.GROUPS, Fact.HOOKS],
        lacks=[Fact.WORKING, *_NO_SYNC],
        per_tag=True,
    ),
    State(
        "ASLEEP",
        "Memory is released, except kept regions; every tag has a copy elsewhere.",
        holds=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED, Fact.HOOKS],
        lacks=[
            Fact.WEIGHTS,
            Fact.GRADS,
            Fact.OPTIMIZER,
            Fact.WORKSPACES,
            Fact.REST,
            Fact.VERSION_SHOWN,
            Fact.OPTIMIZER_VALID,
            Fact.REST_VALID,
            Fact.GROUPS,
            Fact.WORKING,
            Fact.LOADING,
            *_NO_SYNC,
        ],
    ),
    State(
        "SYNCING",
        "A version is on its way to the engines; remembers where it came from.",
        holds=[Fact.SOURCE_LEASED, Fact.HOOKS],
        lacks=[Fact.WORKING, Fact.LOADING, Fact.ENGINES_PAUSED, Fact.UPDATE_OPEN],
        per_origin=True,
    ),
    State("FAULTED", "An effect stopped half-way and could not be undone."),
    State(
        "CLOSED",
        "Hooks are off and everything is given back.",
        lacks=[Fact.HOOKS, Fact.WORKING, Fact.LOADING],
        final=True,
    ),
)

EVENTS = (
    Event("sleep", "Release the device memory."),
    Event("wake_up", "Take memory back and restore the tag's version."),
    Event("switch", "Show another tag's version on the device."),
    Event("begin_training", "Open a training phase."),
    Event("end_training", "Close the phase: its weights are a new version."),
    Event("abort_training", "Close the phase without a result."),
    Event("discard_grads", "Give up gradients now."),
    Event("tag", "Point a tag at another tag's version."),
    Event("load_optimizer", "The optimizer's state was replaced from outside.", internal=True),
    Event("load", "Let the caller write weights that become the tag's new version."),
    Event("finish_load", "The caller has written them.", internal=True),
    Event("abort_load", "The caller failed to.", internal=True),
    Event("adopt", "Make what the device holds the shown tag's new version."),
    Event("start_sync", "Begin sending a version to engines.", internal=True),
    Event("finish_sync", "Send, verify, publish.", internal=True),
    Event("fail_sync", "A sync that failed ends.", internal=True),
    Event("fault", "An effect could not be undone.", internal=True),
    Event("recover", "Read back what is there and restore the rest."),
    Event("close", "End the life cycle and give everything back."),
)

GUARDS = (
    Guard(
        "no_phase",
        "a training phase is open",
        "Call end_training() or abort_training() first.",
        forbids=[Fact.WORKING],
    ),
    Guard("in_phase", "no training phase is open", "Call begin_training() first.", requires=[Fact.WORKING]),
    Guard("no_load", "a load is open", "Leave the loading() block first.", forbids=[Fact.LOADING]),
    Guard("in_load", "no load is open", "Use loading(tag).", requires=[Fact.LOADING]),
    Guard(
        "no_scope",
        "a using() or hold() scope is open",
        "Leave it first; leaving the outermost goes back to sleep by itself.",
        forbids=[Fact.SCOPE_OPEN],
    ),
    Guard(
        "no_backward_left",
        "gradients of a backward outside any phase are left",
        "Step the optimizer, or give them up with discard_grads() or zero_grad().",
        forbids=[Fact.BACKWARD_LEFT],
    ),
    Guard(
        "no_device_reader",
        "weights() is reading the device",
        "Leave the weights() block first.",
        forbids=[Fact.DEVICE_LEASED],
    ),
    Guard("no_reader", "a weights() block is open", "Leave the weights() block first.", forbids=[Fact.LEASED]),
    Guard("memory_free", "too little memory is free", "Release memory elsewhere first.", forbids=[Fact.MEMORY_SHORT]),
    Guard(
        "addresses_free",
        "CUDA graphs may have been captured over memory whose addresses this backend can not keep",
        "Use the torch_memory_saver backend, or drop the graphs.",
        forbids=[Fact.GRAPHS_PIN_ADDRESSES],
    ),
    Guard(
        "has_optimizer",
        "no optimizer is attached",
        "Give one to ActorLifecycle(optimizer=...).",
        forbids=[Fact.NO_OPTIMIZER],
    ),
    Guard("not_closing", "closing had begun", "Call close() again.", requires=[Fact.HOOKS]),
    Guard("not_actor", "'actor' follows training", "Move another tag.", forbids=[Fact.TAG_IS_ACTOR]),
    Guard("not_shown", "the device shows this tag", "Switch to another tag first.", forbids=[Fact.TAG_IS_SHOWN]),
    Guard(
        "of_frozen",
        "the other tag points at a working version",
        "End the training phase first.",
        forbids=[Fact.OF_WORKING],
    ),
    Guard(
        "rotation_hidden",
        "the rotation would move 'actor' or the tag that the device shows",
        "Rotate other tags, or switch away first.",
        forbids=[Fact.ROTATES_SHOWN],
    ),
)

_QUIET = ("no_phase", "no_load")
_TO_SLEEP = (*_QUIET, "no_scope", "no_backward_left", "no_device_reader", "addresses_free")
_TO_MOVE = (*_QUIET, "no_device_reader", "memory_free")
_RELEASE = ("drop_workspaces", "discard_grads", "collect_memory", "suspend_groups", "pause_regions")
_SLEEP = (
    "settle_writers",
    "check_structure",
    "verify_weights",
    "copy_out_weights",
    "adopt_optimizer_state",
    "back_up_regions",
    "agree",
    *_RELEASE,
)
_WAKE_ACTOR = (
    "check_structure",
    "agree",
    "resume_actor_regions",
    "reload_groups",
    "restore_rest",
    "restore_weights",
    "restore_optimizer",
)
_WAKE_OTHER = (
    "check_structure",
    "agree",
    "resume_forward_regions",
    "reload_groups",
    "restore_rest",
    "restore_weights",
)
_AWAY = ("check_structure", "verify_weights", "copy_out_weights", "agree", "restore_weights")
_HELD = (Fact.TARGET_HELD,)
_STAY = ("resume_actor_regions", "restore_optimizer")
_HOME = (
    "check_structure",
    "verify_weights",
    "copy_out_weights",
    "agree",
    "resume_actor_regions",
    "restore_weights",
    "restore_optimizer",
)
_BEGIN = (
    "check_structure",
    "adopt_optimizer_state",
    "verify_weights",
    "copy_out_weights",
    "agree",
    "zero_grads",
    "open_phase",
)
_LOAD = ("check_structure", "verify_weights", "copy_out_weights", "agree", "open_load")
_END_LOAD = ("check_structure", "freeze_load", "copy_out_loaded", "restore_weights")
_CONNECT = ("raise_sync_groups", "connect_engines", "lease_source")
_SEND = (
    "pause_generation",
    "flush_caches",
    "send_weights",
    "check_engines",
    "end_updates",
    "publish_version",
    "rotate_tags",
    "continue_generation",
    "release_source",
    "lower_sync_groups",
)
_END_SYNC = ("abort_updates", "continue_untouched", "release_source", "lower_sync_groups")
_READ_BACK = ("abandon_sync", "lower_sync_groups", "read_back", "close_open_business")
_COME_HOME = (
    "copy_out_survivors",
    "check_copies",
    "resume_actor_regions",
    "reload_groups",
    "restore_rest",
    "restore_weights",
    "restore_optimizer",
)
_BRING = ("resume_actor_regions", "reload_groups", "restore_rest", "restore_weights", "restore_optimizer")
_LEAVE = ("resume_actor_regions", "restore_actor", "restore_optimizer")
_GIVE_BACK = ("remove_hooks", "free_copies")
_TO_SYNC = (*_QUIET, "rotation_hidden")

ROWS = (
    Row("sleep", "RESIDENT", "ASLEEP", _SLEEP, _TO_SLEEP),
    Row("sleep", "SWITCHED", "ASLEEP", _SLEEP, _TO_SLEEP),
    Row("sleep", "ASLEEP", "ASLEEP"),
    Row("wake_up", "ASLEEP", "RESIDENT", _WAKE_ACTOR, ("memory_free",), Match.ACTOR),
    Row("wake_up", "ASLEEP", "SWITCHED", _WAKE_OTHER, ("memory_free",), Match.OTHER),
    Row("wake_up", "RESIDENT", SAME, ("reload_groups",), (), Match.SHOWN),
    Row("wake_up", "SWITCHED", SAME, ("reload_groups",), (), Match.SHOWN),
    Row("switch", "RESIDENT", SAME, (), (), Match.ACTOR),
    Row("switch", "RESIDENT", "SWITCHED", (), _TO_MOVE, Match.OTHER, when=_HELD),
    Row("switch", "RESIDENT", "SWITCHED", _AWAY, _TO_MOVE, Match.OTHER, unless=_HELD),
    Row("switch", "SWITCHED", "SWITCHED", (), _TO_MOVE, Match.OTHER, when=_HELD),
    Row("switch", "SWITCHED", "SWITCHED", _AWAY, _TO_MOVE, Match.OTHER, unless=_HELD),
    Row("switch", "SWITCHED", "RESIDENT", _STAY, _TO_MOVE, Match.ACTOR, when=_HELD),
    Row("switch", "SWITCHED", "RESIDENT", _HOME, _TO_MOVE, Match.ACTOR, unless=_HELD),
    Row("begin_training", "RESIDENT", SAME, _BEGIN, (*_QUIET, "has_optimizer", "no_device_reader")),
    Row(
        "end_training",
        "RESIDENT",
        SAME,
        ("check_structure", "adopt_optimizer_state", "freeze_version"),
        ("in_phase", "no_device_reader"),
    ),
    Row("abort_training", "RESIDENT", SAME, ("settle_phase", "restore_base"), ("in_phase", "no_device_reader")),
    Row("discard_grads", "RESIDENT", SAME, ("discard_grads", "collect_memory"), ("no_phase",)),
    Row("tag", "RESIDENT", SAME, ("move_tag",), ("not_actor", "not_shown", "of_frozen", "no_load")),
    Row("tag", "SWITCHED", SAME, ("move_tag",), ("not_actor", "not_shown", "of_frozen", "no_load")),
    Row("tag", "ASLEEP", SAME, ("move_tag",), ("not_actor",)),
    Row("tag", "SYNCING", SAME, ("move_tag",), ("not_actor", "not_shown")),
    Row("load_optimizer", "RESIDENT", SAME, ("check_structure", "adopt_optimizer_state"), ("no_phase",)),
    Row("load", "RESIDENT", SAME, _LOAD, (*_QUIET, "no_device_reader")),
    Row("load", "SWITCHED", SAME, _LOAD, (*_QUIET, "no_device_reader")),
    Row("finish_load", "RESIDENT", SAME, _END_LOAD, ("in_load", "no_phase")),
    Row("finish_load", "SWITCHED", SAME, _END_LOAD, ("in_load",)),
    Row("abort_load", "RESIDENT", SAME, ("drop_load", "restore_weights"), ("in_load", "no_phase")),
    Row("abort_load", "SWITCHED", SAME, ("drop_load", "restore_weights"), ("in_load",)),
    Row("adopt", "RESIDENT", SAME, ("check_structure", "adopt_weights"), (*_QUIET, "no_device_reader")),
    Row("adopt", "SWITCHED", SAME, ("check_structure", "adopt_weights"), (*_QUIET, "no_device_reader")),
    Row(
        "start_sync",
        "RESIDENT",
        "SYNCING",
        ("settle_writers", "check_structure", "verify_weights", "copy_out_weights", "agree", *_CONNECT),
        _TO_SYNC,
    ),
    Row(
        "start_sync",
        "SWITCHED",
        "SYNCING",
        ("settle_writers", "check_structure", "verify_weights", "copy_out_weights", "agree", *_CONNECT),
        _TO_SYNC,
    ),
    Row("start_sync", "ASLEEP", "SYNCING", ("settle_writers", "agree", *_CONNECT), _TO_SYNC),
    Row("finish_sync", "SYNCING", ORIGIN, _SEND),
    Row("fail_sync", "SYNCING", ORIGIN, _END_SYNC),
    Row("fault", "RESIDENT", "FAULTED"),
    Row("fault", "SWITCHED", "FAULTED"),
    Row("fault", "ASLEEP", "FAULTED"),
    Row("fault", "SYNCING", "FAULTED"),
    Row("fault", "FAULTED", "FAULTED"),
    Row("recover", "FAULTED", "RESIDENT", (*_READ_BACK, *_COME_HOME), ("not_closing",), unless=[Fact.WEIGHTS_LOST]),
    Row(
        "recover",
        "FAULTED",
        "ASLEEP",
        (*_READ_BACK, "check_copies", *_RELEASE),
        ("not_closing",),
        when=[Fact.WEIGHTS_LOST],
    ),
    # close() aborts an open phase or load first, by their own rows
    Row("close", "RESIDENT", "CLOSED", _GIVE_BACK, (*_QUIET, "no_reader")),
    Row("close", "SWITCHED", "CLOSED", (*_LEAVE, *_GIVE_BACK), (*_QUIET, "no_reader", "memory_free")),
    Row("close", "ASLEEP", "CLOSED", (*_BRING, *_GIVE_BACK), ("no_reader", "memory_free")),
    Row("close", "SYNCING", "CLOSED", ("abandon_sync", "lower_sync_groups", "bring_back", *_GIVE_BACK)),
    Row("close", "FAULTED", "CLOSED", (*_READ_BACK, "bring_back", *_GIVE_BACK)),
    Row("close", "CLOSED", SAME),
)

USES = (
    Use(
        "weights",
        ("RESIDENT", "SWITCHED", "ASLEEP", "SYNCING"),
        "nothing here says which bytes are whose",
        "recover() first.",
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
        "gradients would be of other weights than the actor's",
        "wake_up() or switch('actor') first, and use torch.no_grad() for forwards of other tags.",
    ),
    Use(
        "step",
        ("RESIDENT",),
        "the optimizer would write over other weights than the actor's",
        "wake_up() or switch('actor') first.",
        forbids=[Fact.LOADING],
    ),
    Use(
        "state_dict",
        ("RESIDENT",),
        "the device does not hold the actor's weights",
        "weights('actor') reads them in every state.",
        or_when=[Fact.LOADING],
    ),
    Use(
        "load_state_dict",
        ("RESIDENT",),
        "it would write over released memory or another tag's weights",
        "Use loading(tag), awake.",
        forbids=[Fact.WORKING],
        or_when=[Fact.LOADING],
    ),
    Use(
        "optimizer_state_dict",
        ("RESIDENT", "SWITCHED", "SYNCING"),
        "the optimizer state is not on the device",
        "wake_up() or hold() first.",
        needs=[Fact.OPTIMIZER_VALID],
    ),
    Use(
        "load_optimizer_state_dict",
        ("RESIDENT",),
        "the optimizer state is not on the device, or in use by an open phase",
        "wake_up() first, outside a training phase.",
        forbids=[Fact.WORKING],
    ),
)

ADVICE = (
    Advice("switch", "ASLEEP", "wake_up(tag) goes straight there."),
    Advice("wake_up", "RESIDENT", "The actor is awake: use switch(tag)."),
    Advice("wake_up", "SWITCHED", "The actor is awake: use switch(tag)."),
    Advice("begin_training", "SWITCHED", "switch('actor') first."),
    Advice("begin_training", "ASLEEP", "wake_up() first."),
    Advice("load", "ASLEEP", "wake_up() or wake_up(tag) first."),
    Advice("adopt", "ASLEEP", "Nothing on the device could have changed: it is released."),
)

ACTOR = MachineSpec(
    name="actor",
    initial="RESIDENT",
    states=STATES,
    events=EVENTS,
    effects=EFFECTS,
    guards=GUARDS,
    rows=ROWS,
    uses=USES,
    advice=ADVICE,
)
