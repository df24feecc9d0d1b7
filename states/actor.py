"""THE table: the life cycle of a training actor. Every state change of the running machine is a row of it.

Order inside a row is the field's experience: writers settle before memory moves, copies are complete before a region is
paused, workspaces and gradients go before process groups, groups before memory; coming back is the mirror image.
"""

from __future__ import annotations

from states.effects import EFFECTS
from states.guards import GUARDS
from states.resources import Fact
from states.spec import ORIGIN, SAME, Advice, Event, MachineSpec, Match, Row, State
from states.uses import USES

_NO_SYNC = (Fact.SYNC_GROUPS, Fact.SOURCE_LEASED, Fact.ENGINES_PAUSED, Fact.UPDATE_OPEN)
_ALL_THERE = (Fact.ARRIVING, Fact.OPTIMIZER_ARRIVING, Fact.HALF_MOVED)

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
        lacks=[Fact.HALF_MOVED, *_NO_SYNC],
        shows="actor",
    ),
    State(
        "SWITCHED",
        "The device holds another tag's version: forward only.",
        holds=[Fact.WEIGHTS, Fact.REST, Fact.VERSION_SHOWN, Fact.REST_VALID, Fact.GROUPS, Fact.HOOKS],
        lacks=[Fact.WORKING, Fact.OPTIMIZER_ARRIVING, Fact.HALF_MOVED, *_NO_SYNC],
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
            *_ALL_THERE,
            *_NO_SYNC,
        ],
    ),
    State(
        "SYNCING",
        "A version is on its way to the engines; remembers where it came from.",
        holds=[Fact.SOURCE_LEASED, Fact.HOOKS],
        lacks=[Fact.WORKING, Fact.LOADING, Fact.ENGINES_PAUSED, Fact.UPDATE_OPEN, *_ALL_THERE],
        per_origin=True,
    ),
    State("FAULTED", "An effect stopped half-way and could not be undone."),
    State(
        "CLOSED",
        "Hooks are off and everything is given back.",
        lacks=[Fact.HOOKS, Fact.WORKING, Fact.LOADING, *_ALL_THERE],
        final=True,
    ),
)

EVENTS = (
    Event("sleep", "Release the device memory."),
    Event("wake_up", "Take memory back and restore the tag's version.", any_tag=True),
    Event("arrive", "Weights on their way have come.", internal=True, takes=[Fact.ARRIVING]),
    Event(
        "arrive_optimizer",
        "Optimizer state on its way has come.",
        internal=True,
        takes=[Fact.OPTIMIZER_ARRIVING],
    ),
    Event("switch", "Show another tag's version on the device.", any_tag=True),
    Event("begin_training", "Open a training phase.", gives=[Fact.WORKING]),
    Event("end_training", "Close the phase: its weights are a new version.", takes=[Fact.WORKING]),
    Event("abort_training", "Close the phase without a result.", takes=[Fact.WORKING]),
    Event("discard_grads", "Give up gradients now.", gives=[Fact.COLLECTED], takes=[Fact.GRADS]),
    Event("tag", "Point a tag at another tag's version.", gives=[Fact.TAG_MOVED]),
    Event(
        "load_optimizer",
        "The optimizer's state was replaced from outside.",
        internal=True,
        gives=[Fact.CHECKED, Fact.OPTIMIZER_ADOPTED],
    ),
    Event("load", "Let the caller write weights that become the tag's new version.", gives=[Fact.LOADING]),
    Event("finish_load", "The caller has written them.", internal=True, takes=[Fact.LOADING]),
    Event("abort_load", "The caller failed to.", internal=True, takes=[Fact.LOADING]),
    Event("adopt", "Make what the device holds the shown tag's new version.", gives=[Fact.WEIGHTS_ADOPTED]),
    Event("start_sync", "Begin sending a version to engines.", internal=True),
    Event("finish_sync", "Send, verify, publish.", internal=True, gives=[Fact.PUBLISHED, Fact.ROTATED]),
    Event("fail_sync", "A sync that failed ends.", internal=True, gives=[Fact.UPDATES_ENDED, Fact.OTHERS_CONTINUE]),
    Event("fault", "An effect could not be undone.", internal=True),
    Event("recover", "Read back what is there and restore the rest."),
    Event(
        "close",
        "End the life cycle and give everything back.",
        takes=[Fact.VERSIONS_COPIED, Fact.BACKUPS_COPIED, *_NO_SYNC],
    ),
)

_LANDED = ("arrived", "optimizer_arrived")
_QUIET = ("no_phase", "no_load")
_TO_SLEEP_SWITCHED = ("no_load", "no_scope", "no_backward_left", "no_device_reader", "addresses_free", "arrived")
_TO_SLEEP = (*_QUIET, "no_scope", "no_backward_left", "no_device_reader", "addresses_free", *_LANDED)
_TO_MOVE = ("no_load", "no_device_reader", "arrived")
RELEASE = ("drop_workspaces", "discard_grads", "collect_memory", "suspend_groups", "pause_regions")
_SLEEP = (
    "settle_writers",
    "check_structure",
    "adopt_optimizer_state",
    "verify_weights",
    "copy_out_weights",
    "back_up_regions",
    "agree",
    *RELEASE,
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
_AWAY = ("check_structure", "verify_weights", "copy_out_weights", "agree", "exchange_weights", "restore_weights")
_HELD = (Fact.TARGET_HELD,)
_STAY = ("agree", "resume_actor_regions", "restore_optimizer")
_HOME = (
    "check_structure",
    "verify_weights",
    "copy_out_weights",
    "agree",
    "resume_actor_regions",
    "exchange_weights",
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
_END_LOAD = ("check_structure", "agree", "freeze_load", "copy_out_loaded", "restore_weights")
_CONNECT = ("agree", "raise_sync_groups", "connect_engines", "lease_source")
_SEND = (
    "pause_generation",
    "flush_caches",
    "send_weights",
    "check_engines",
    "agree",
    "end_updates",
    "publish_version",
    "rotate_tags",
    "continue_generation",
    "lower_sync_groups",
    "release_source",
)
_END_SYNC = ("abort_updates", "continue_untouched", "lower_sync_groups", "release_source")
READ_BACK = ("abandon_sync", "lower_sync_groups", "read_back", "close_open_business")
_COME_HOME = (
    "copy_out_survivors",
    "check_copies",
    "resume_actor_regions",
    "reload_groups",
    "restore_rest",
    "restore_weights",
    "restore_optimizer",
)
_BRING = (
    "check_structure",
    "agree",
    "resume_actor_regions",
    "reload_groups",
    "restore_rest",
    "restore_actor",
    "restore_optimizer",
)
_LEAVE = (
    "check_structure",
    "agree",
    "copy_out_survivors",
    "resume_actor_regions",
    "restore_actor",
    "restore_optimizer",
)
GIVE_BACK = ("remove_hooks", "free_copies")
_GO_DOWN = ("copy_out_everything", "check_copies", *RELEASE)
_TO_SYNC = (*_QUIET, "rotation_hidden")
_TO_RECOVER = ("not_closing", "no_device_reader")

ROWS = (
    Row("sleep", "RESIDENT", "ASLEEP", _SLEEP, _TO_SLEEP),
    Row("sleep", "SWITCHED", "ASLEEP", _SLEEP, _TO_SLEEP_SWITCHED),
    Row("sleep", "ASLEEP", "ASLEEP"),
    Row("wake_up", "ASLEEP", "RESIDENT", _WAKE_ACTOR, ("memory_free",), Match.ACTOR),
    Row("wake_up", "ASLEEP", "SWITCHED", _WAKE_OTHER, ("memory_free",), Match.OTHER),
    Row("wake_up", "RESIDENT", SAME, ("reload_groups",), (), Match.SHOWN),
    Row("wake_up", "SWITCHED", SAME, ("reload_groups",), (), Match.SHOWN),
    Row("arrive", "RESIDENT", SAME, ("await_weights",)),
    Row("arrive", "SWITCHED", SAME, ("await_weights",)),
    Row("arrive_optimizer", "RESIDENT", SAME, ("await_optimizer",)),
    Row("switch", "RESIDENT", SAME, (), (), Match.ACTOR),
    Row(
        "switch",
        "RESIDENT",
        "SWITCHED",
        ("agree",),
        ("no_phase", "no_device_reader", *_LANDED),
        Match.OTHER,
        when=_HELD,
    ),
    Row(
        "switch", "RESIDENT", "SWITCHED", _AWAY, ("no_phase", *_TO_MOVE, "optimizer_arrived"), Match.OTHER, unless=_HELD
    ),
    Row("switch", "SWITCHED", "SWITCHED", ("agree",), ("no_device_reader", "arrived"), Match.OTHER, when=_HELD),
    Row("switch", "SWITCHED", "SWITCHED", _AWAY, _TO_MOVE, Match.OTHER, unless=_HELD),
    Row(
        "switch", "SWITCHED", "RESIDENT", _STAY, ("no_device_reader", "memory_free", "arrived"), Match.ACTOR, when=_HELD
    ),
    Row("switch", "SWITCHED", "RESIDENT", _HOME, (*_TO_MOVE, "memory_free"), Match.ACTOR, unless=_HELD),
    Row("begin_training", "RESIDENT", SAME, _BEGIN, (*_QUIET, "has_optimizer", "no_device_reader", *_LANDED)),
    Row(
        "end_training",
        "RESIDENT",
        SAME,
        ("check_structure", "adopt_optimizer_state", "agree", "freeze_version"),
        ("in_phase", "no_device_reader", *_LANDED),
    ),
    Row(
        "abort_training",
        "RESIDENT",
        SAME,
        ("agree", "settle_phase", "restore_base"),
        ("in_phase", "no_device_reader", *_LANDED),
    ),
    Row("discard_grads", "RESIDENT", SAME, ("discard_grads", "collect_memory"), ("no_phase",)),
    Row("tag", "RESIDENT", SAME, ("agree", "move_tag"), ("not_actor", "of_frozen")),
    Row("tag", "SWITCHED", SAME, ("agree", "move_tag"), ("not_actor", "not_shown")),
    Row("tag", "ASLEEP", SAME, ("agree", "move_tag"), ("not_actor",)),
    Row("tag", "SYNCING", SAME, ("agree", "move_tag"), ("not_actor", "not_shown")),
    Row("load_optimizer", "RESIDENT", SAME, ("check_structure", "adopt_optimizer_state"), ("no_phase", *_LANDED)),
    Row("load", "RESIDENT", SAME, _LOAD, (*_QUIET, "no_device_reader", *_LANDED)),
    Row("load", "SWITCHED", SAME, _LOAD, ("no_load", "no_device_reader", "arrived")),
    Row("finish_load", "RESIDENT", SAME, _END_LOAD, ("in_load", "no_phase")),
    Row("finish_load", "SWITCHED", SAME, _END_LOAD, ("in_load",)),
    Row("abort_load", "RESIDENT", SAME, ("agree", "drop_load", "restore_weights"), ("in_load", "no_phase")),
    Row("abort_load", "SWITCHED", SAME, ("agree", "drop_load", "restore_weights"), ("in_load",)),
    Row(
        "adopt",
        "RESIDENT",
        SAME,
        ("check_structure", "agree", "adopt_weights"),
        (*_QUIET, "no_device_reader", *_LANDED),
    ),
    Row(
        "adopt",
        "SWITCHED",
        SAME,
        ("check_structure", "agree", "adopt_weights"),
        ("no_load", "no_device_reader", "arrived"),
    ),
    Row(
        "start_sync",
        "RESIDENT",
        "SYNCING",
        ("settle_writers", "check_structure", "verify_weights", "copy_out_weights", *_CONNECT),
        (*_TO_SYNC, *_LANDED),
    ),
    Row(
        "start_sync",
        "SWITCHED",
        "SYNCING",
        ("settle_writers", "check_structure", "verify_weights", "copy_out_weights", *_CONNECT),
        ("no_load", "rotation_hidden", "arrived"),
    ),
    Row("start_sync", "ASLEEP", "SYNCING", ("settle_writers", *_CONNECT), ("rotation_hidden",)),
    Row("finish_sync", "SYNCING", ORIGIN, _SEND),
    Row("fail_sync", "SYNCING", ORIGIN, _END_SYNC),
    Row("fault", "RESIDENT", "FAULTED"),
    Row("fault", "SWITCHED", "FAULTED"),
    Row("fault", "ASLEEP", "FAULTED"),
    Row("fault", "SYNCING", "FAULTED"),
    Row("fault", "FAULTED", "FAULTED"),
    Row(
        "recover",
        "FAULTED",
        "RESIDENT",
        ("agree", *READ_BACK, *_COME_HOME),
        (*_TO_RECOVER, "memory_free"),
        unless=[Fact.WEIGHTS_LOST],
    ),
    Row(
        "recover",
        "FAULTED",
        "ASLEEP",
        ("settle_writers", "agree", *READ_BACK, *_GO_DOWN),
        _TO_RECOVER,
        when=[Fact.WEIGHTS_LOST],
    ),
    # close() aborts an open phase or load first, by their own rows
    Row("close", "RESIDENT", "CLOSED", GIVE_BACK, (*_QUIET, "no_reader", *_LANDED)),
    Row("close", "SWITCHED", "CLOSED", (*_LEAVE, *GIVE_BACK), ("no_load", "no_reader", "memory_free", "arrived")),
    Row("close", "ASLEEP", "CLOSED", (*_BRING, *GIVE_BACK), ("no_reader", "memory_free")),
    Row("close", "SYNCING", "CLOSED", ("abandon_sync", "lower_sync_groups", "bring_back", *GIVE_BACK), ("no_reader",)),
    Row("close", "FAULTED", "CLOSED", (*READ_BACK, "bring_back", *GIVE_BACK), ("no_reader",)),
    Row("close", "CLOSED", SAME),
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

#: What each state refuses, said explicitly, so that a row that gets lost is noticed.
_TRAIN = ("begin_training", "end_training", "abort_training", "discard_grads", "load_optimizer")
_LOADS = ("load", "finish_load", "abort_load", "adopt")
_SYNCS = ("start_sync", "finish_sync", "fail_sync")
_MOVES = ("sleep", "wake_up", "switch")
_ARRIVALS = ("arrive", "arrive_optimizer")
REFUSED = (
    ("RESIDENT", ("finish_sync", "fail_sync", "recover")),
    ("SWITCHED", (*_TRAIN, "arrive_optimizer", "finish_sync", "fail_sync", "recover")),
    ("ASLEEP", (*_TRAIN, *_LOADS, *_ARRIVALS, "switch", "finish_sync", "fail_sync", "recover")),
    ("SYNCING", (*_TRAIN, *_LOADS, *_MOVES, *_ARRIVALS, "start_sync", "recover")),
    ("FAULTED", (*_TRAIN, *_LOADS, *_SYNCS, *_MOVES, *_ARRIVALS, "tag")),
    ("CLOSED", (*_TRAIN, *_LOADS, *_SYNCS, *_MOVES, *_ARRIVALS, "tag", "fault", "recover")),
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
    refused=REFUSED,
)
