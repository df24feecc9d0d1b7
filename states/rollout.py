"""The table of the rollout engine: when it may generate, take weights, and give memory back.

Read next to ``states/spec.py``. Five states are enough to say what may be asked; which pool is mapped, whether a
version is held and whether a request is under way are facts beside them. ``release`` and ``resume`` name pools, and
each pool is an event of its own here, so that every row says exactly what it changes.
"""

from __future__ import annotations

from enum import StrEnum

from states.spec import SAME, Advice, Effect, Event, Guard, MachineSpec, Row, State


class EngineFact(StrEnum):
    """What can be true of an engine. The facts up to ``REQUESTS`` are resources, the rest conditions of one call."""

    WEIGHTS_IN = "weights pool mapped"
    KV_IN = "kv cache pool mapped"
    PAUSED = "generation is paused"
    RECEIVING = "a half-received update"
    VERSION_HELD = "it holds a complete version"
    REQUESTS = "a request is accepted and not finished"

    RUNNING = "a request runs, and is not frozen between two tokens"
    OLDER = "the update's version is older than the held one"
    OTHER_VERSION = "the version is not the open update's"
    NAMES_MISSING = "a name of the model did not come"
    READS_ITSELF = "it reads the sender's memory by itself"


#: Conditions of one call: only guards ask for them.
ENGINE_CONDITIONS = frozenset(list(EngineFact)[list(EngineFact).index(EngineFact.RUNNING) :])

_F = EngineFact

STATES = (
    State(
        "AWAKE",
        "Accepts requests, if it holds a version.",
        holds=[_F.WEIGHTS_IN, _F.KV_IN],
        lacks=[_F.PAUSED, _F.RECEIVING],
    ),
    State(
        "PAUSED",
        "Accepts no request; those it has accepted come to rest, or have.",
        holds=[_F.WEIGHTS_IN, _F.KV_IN, _F.PAUSED],
        lacks=[_F.RECEIVING],
    ),
    State(
        "UPDATING",
        "Weights are coming; it holds no version and generates nothing.",
        holds=[_F.WEIGHTS_IN, _F.RECEIVING],
        lacks=[_F.VERSION_HELD, _F.REQUESTS],
    ),
    State(
        "ASLEEP",
        "At least one pool is released; nothing is generated.",
        lacks=[_F.RECEIVING, _F.REQUESTS],
    ),
    State("STOPPED", "Takes no more calls; what runs ends at its next token.", holds=[_F.PAUSED], final=True),
)

EVENTS = (
    Event("generate", "Accept a request."),
    Event("finish", "The last accepted request has ended.", internal=True),
    Event("pause_generation", "Accept no request, and bring those accepted to rest."),
    Event("continue_generation", "Accept requests again; what was kept goes on."),
    Event("flush_cache", "Give back what was derived from the weights."),
    Event("begin_update", "Let go of the version and take another's weights."),
    Event("receive", "One bucket of an update that is pushed."),
    Event("check_weights", "Compare the weights with fingerprints."),
    Event("end_update", "The weights that came are the version."),
    Event("abort_update", "End any update and every request, with no version, paused."),
    Event("release_weights", "Give the weights' memory back, and the version with it."),
    Event("release_kv_cache", "Give the cache's memory back."),
    Event("resume_weights", "Take the weights' memory back; it has no contents until an update."),
    Event("resume_kv_cache", "Take the cache's memory back."),
    Event("stop", "Its process ends.", internal=True),
)

#: How an event is called where its name is not the method's.
METHODS = {
    "release_weights": "release",
    "release_kv_cache": "release",
    "resume_weights": "resume",
    "resume_kv_cache": "resume",
}

EFFECTS = (
    Effect(
        "accept_request",
        "The request joins those accepted, with the version held now.",
        needs=[_F.WEIGHTS_IN, _F.KV_IN, _F.VERSION_HELD],
        forbids=[_F.PAUSED, _F.RECEIVING],
        gives=[_F.REQUESTS],
    ),
    Effect("forget_request", "No accepted request is left.", takes=[_F.REQUESTS]),
    Effect(
        "close_admission",
        "No request is accepted from here on; the mode says what becomes of those accepted.",
        gives=[_F.PAUSED],
        inverse="open_admission",
    ),
    Effect(
        "open_admission",
        "Requests are accepted again, and a frozen one goes on.",
        takes=[_F.PAUSED],
        inverse="close_admission",
    ),
    Effect("end_requests", "Every accepted request ends as aborted; return when they have.", takes=[_F.REQUESTS]),
    Effect("give_back_caches", "Freed memory goes back to the system.", harmless=True),
    Effect(
        "drop_version",
        "From here on it holds no version.",
        forbids=[_F.REQUESTS],
        takes=[_F.VERSION_HELD],
    ),
    Effect(
        "open_update",
        "Bytes may be written over the weights.",
        needs=[_F.WEIGHTS_IN],
        forbids=[_F.REQUESTS, _F.VERSION_HELD, _F.RECEIVING],
        gives=[_F.RECEIVING],
        inverse="close_update",
    ),
    Effect("take_bucket", "Write one bucket over the weights.", needs=[_F.WEIGHTS_IN, _F.RECEIVING]),
    Effect("compare_weights", "Fingerprint what is in the weights pool.", needs=[_F.WEIGHTS_IN], harmless=True),
    Effect(
        "hold_version",
        "The weights are whole: they are the version.",
        needs=[_F.WEIGHTS_IN, _F.RECEIVING],
        gives=[_F.VERSION_HELD],
        takes=[_F.RECEIVING],
    ),
    Effect("close_update", "No update is open.", takes=[_F.RECEIVING]),
    Effect(
        "release_weights",
        "The weights' memory is free; contents and version are lost.",
        needs=[_F.WEIGHTS_IN],
        forbids=[_F.REQUESTS, _F.RECEIVING],
        takes=[_F.WEIGHTS_IN, _F.VERSION_HELD],
    ),
    Effect(
        "release_kv_cache",
        "The cache's memory is free.",
        needs=[_F.KV_IN],
        forbids=[_F.REQUESTS, _F.RECEIVING],
        takes=[_F.KV_IN],
        inverse="resume_kv_cache",
    ),
    Effect(
        "resume_weights",
        "The weights' memory is mapped, without contents.",
        forbids=[_F.WEIGHTS_IN],
        gives=[_F.WEIGHTS_IN],
        inverse="release_weights",
    ),
    Effect(
        "resume_kv_cache",
        "The cache's memory is mapped.",
        forbids=[_F.KV_IN],
        gives=[_F.KV_IN],
        inverse="release_kv_cache",
    ),
)

GUARDS = (
    Guard("has_version", "it holds no version of the weights", "Sync weights to it first.", requires=[_F.VERSION_HELD]),
    Guard("at_rest", "a request runs", "Call pause_generation first.", forbids=[_F.RUNNING]),
    Guard(
        "no_request",
        "a request is not finished",
        "Call pause_generation('abort') or pause_generation('wait') first.",
        forbids=[_F.REQUESTS],
    ),
    Guard("weights_in", "the weights pool is released", "Call resume(('weights',)) first.", requires=[_F.WEIGHTS_IN]),
    Guard(
        "not_older",
        "it holds a newer version, and this one is older",
        "abort_update() or release(('weights',)) lets go of the newer one.",
        forbids=[_F.OLDER],
    ),
    Guard(
        "same_version",
        "the open update is of another version",
        "End the update that was begun, or call abort_update.",
        forbids=[_F.OTHER_VERSION],
    ),
    Guard("all_came", "missing names", "Send them, or call abort_update.", forbids=[_F.NAMES_MISSING]),
    Guard(
        "takes_buckets",
        "it reads the sender's memory by itself",
        "begin_update took everything.",
        forbids=[_F.READS_ITSELF],
    ),
)

_BEGIN = ("end_requests", "drop_version", "open_update")
_MAY_BEGIN = ("weights_in", "not_older", "at_rest")
_MAY_END = ("all_came", "same_version")
_ABORT = ("close_admission", "end_requests", "drop_version", "close_update")

ROWS = (
    Row("generate", "AWAKE", SAME, ("accept_request",), ("has_version",)),
    Row("finish", "AWAKE", SAME, ("forget_request",)),
    Row("finish", "PAUSED", SAME, ("forget_request",)),
    Row("finish", "STOPPED", SAME, ("forget_request",)),
    # asked again, another mode rules
    Row("pause_generation", "AWAKE", "PAUSED", ("close_admission",)),
    Row("pause_generation", "PAUSED", SAME, ("close_admission",)),
    Row("pause_generation", "UPDATING", SAME, ("close_admission",)),
    Row("pause_generation", "ASLEEP", SAME, ("close_admission",)),
    Row("continue_generation", "AWAKE", SAME),
    Row("continue_generation", "PAUSED", "AWAKE", ("open_admission",)),
    Row("continue_generation", "ASLEEP", SAME, ("open_admission",)),
    Row("flush_cache", "AWAKE", SAME, ("give_back_caches",), ("at_rest",)),
    Row("flush_cache", "PAUSED", SAME, ("give_back_caches",), ("at_rest",)),
    Row("flush_cache", "UPDATING", SAME, ("give_back_caches",)),
    Row("flush_cache", "ASLEEP", SAME, ("give_back_caches",)),
    # updates
    Row("begin_update", "AWAKE", "UPDATING", _BEGIN, _MAY_BEGIN),
    Row("begin_update", "PAUSED", "UPDATING", _BEGIN, _MAY_BEGIN),
    Row("begin_update", "ASLEEP", "UPDATING", _BEGIN, _MAY_BEGIN),
    Row("receive", "UPDATING", SAME, ("take_bucket",), ("takes_buckets",)),
    Row("check_weights", "AWAKE", SAME, ("compare_weights",)),
    Row("check_weights", "PAUSED", SAME, ("compare_weights",)),
    Row("check_weights", "UPDATING", SAME, ("compare_weights",)),
    Row("check_weights", "ASLEEP", SAME, ("compare_weights",), ("weights_in",)),
    Row("end_update", "UPDATING", "AWAKE", ("hold_version",), _MAY_END, when=[_F.KV_IN], unless=[_F.PAUSED]),
    Row("end_update", "UPDATING", "PAUSED", ("hold_version",), _MAY_END, when=[_F.KV_IN, _F.PAUSED]),
    Row("end_update", "UPDATING", "ASLEEP", ("hold_version",), _MAY_END, unless=[_F.KV_IN]),
    Row("abort_update", "AWAKE", "PAUSED", _ABORT),
    Row("abort_update", "PAUSED", "PAUSED", _ABORT),
    Row("abort_update", "UPDATING", "PAUSED", _ABORT, when=[_F.KV_IN]),
    Row("abort_update", "UPDATING", "ASLEEP", _ABORT, unless=[_F.KV_IN]),
    Row("abort_update", "ASLEEP", SAME, _ABORT),
    Row("abort_update", "STOPPED", SAME, _ABORT),
    # pools: what is released already, or mapped already, is left alone
    Row("release_weights", "AWAKE", "ASLEEP", ("release_weights",), ("no_request",)),
    Row("release_weights", "PAUSED", "ASLEEP", ("release_weights",), ("no_request",)),
    Row("release_weights", "ASLEEP", SAME, ("release_weights",), when=[_F.WEIGHTS_IN]),
    Row("release_weights", "ASLEEP", SAME, unless=[_F.WEIGHTS_IN]),
    Row("release_kv_cache", "AWAKE", "ASLEEP", ("release_kv_cache",), ("no_request",)),
    Row("release_kv_cache", "PAUSED", "ASLEEP", ("release_kv_cache",), ("no_request",)),
    Row("release_kv_cache", "UPDATING", SAME, unless=[_F.KV_IN]),
    Row("release_kv_cache", "ASLEEP", SAME, ("release_kv_cache",), when=[_F.KV_IN]),
    Row("release_kv_cache", "ASLEEP", SAME, unless=[_F.KV_IN]),
    Row("resume_weights", "AWAKE", SAME),
    Row("resume_weights", "PAUSED", SAME),
    Row("resume_weights", "UPDATING", SAME),
    Row("resume_weights", "ASLEEP", SAME, when=[_F.WEIGHTS_IN]),
    Row("resume_weights", "ASLEEP", SAME, ("resume_weights",), unless=[_F.WEIGHTS_IN, _F.KV_IN]),
    Row("resume_weights", "ASLEEP", "AWAKE", ("resume_weights",), when=[_F.KV_IN], unless=[_F.WEIGHTS_IN, _F.PAUSED]),
    Row("resume_weights", "ASLEEP", "PAUSED", ("resume_weights",), when=[_F.KV_IN, _F.PAUSED], unless=[_F.WEIGHTS_IN]),
    Row("resume_kv_cache", "AWAKE", SAME),
    Row("resume_kv_cache", "PAUSED", SAME),
    Row("resume_kv_cache", "UPDATING", SAME, when=[_F.KV_IN]),
    Row("resume_kv_cache", "UPDATING", SAME, ("resume_kv_cache",), unless=[_F.KV_IN]),
    Row("resume_kv_cache", "ASLEEP", SAME, when=[_F.KV_IN]),
    Row("resume_kv_cache", "ASLEEP", SAME, ("resume_kv_cache",), unless=[_F.WEIGHTS_IN, _F.KV_IN]),
    Row("resume_kv_cache", "ASLEEP", "AWAKE", ("resume_kv_cache",), when=[_F.WEIGHTS_IN], unless=[_F.KV_IN, _F.PAUSED]),
    Row(
        "resume_kv_cache", "ASLEEP", "PAUSED", ("resume_kv_cache",), when=[_F.WEIGHTS_IN, _F.PAUSED], unless=[_F.KV_IN]
    ),
    *(Row("stop", state, "STOPPED", ("close_admission",)) for state in ("AWAKE", "PAUSED", "UPDATING", "ASLEEP")),
    Row("stop", "STOPPED", SAME),
)

_NO_UPDATE = "No update is open: call begin_update first."
_OPEN_UPDATE = "An update is open: call end_update or abort_update first."

ADVICE = (
    Advice("generate", "PAUSED", "It is paused: call continue_generation first."),
    Advice("generate", "UPDATING", _OPEN_UPDATE),
    Advice("generate", "ASLEEP", "A pool is released: resume it, and sync weights that were released."),
    Advice("continue_generation", "UPDATING", _OPEN_UPDATE),
    Advice("begin_update", "UPDATING", _OPEN_UPDATE),
    Advice("release_weights", "UPDATING", _OPEN_UPDATE),
    Advice("release_kv_cache", "UPDATING", _OPEN_UPDATE),
    *(
        Advice(event, state, _NO_UPDATE)
        for event in ("receive", "end_update")
        for state in ("AWAKE", "PAUSED", "ASLEEP")
    ),
    *(
        Advice(event.name, "STOPPED", "The engine is stopping: start or restart it.")
        for event in EVENTS
        if event.name not in ("finish", "abort_update", "stop")
    ),
)

ROLLOUT = MachineSpec(
    name="rollout",
    initial="AWAKE",
    states=STATES,
    events=EVENTS,
    effects=EFFECTS,
    guards=GUARDS,
    rows=ROWS,
    advice=ADVICE,
)
