"""Options for trainers that read their settings with argparse, under the names that such trainers use already.

``add_lifecycle_arguments`` adds those that the parser does not have. Whoever defined an option, it is read from the
namespace by its name, so a parser of Megatron's, slime's or miles' kind is served as it is. An option whose machinery
does not exist is refused when it is set, with the reason: ignoring it would be a promise not kept.
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence, Set
from numbers import Number
from types import FunctionType, MethodType
from typing import Any, TypeVar

from attrs import field, fields_dict, frozen

from lifecycle.config import KEEPABLE, LifecycleConfig

_T = TypeVar("_T", bound=ArgumentParser)

#: Given by mistake, these would look like a namespace in which nothing is set.
_NO_NAMESPACE = (ArgumentParser, LifecycleConfig, str, bytes, Number, Sequence, Set, FunctionType, MethodType)


@frozen
class _Option:
    """One option; ``sets`` is the setting of LifecycleConfig that it gives, where it gives one."""

    name: str
    help: str
    sets: str | None = None
    keywords: Mapping[str, Any] = field(factory=dict)

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, f"--no-{self.name.removeprefix('--')}") if "action" in self.keywords else (self.name,)

    @property
    def default(self) -> Any:
        default = self.keywords.get("default", fields_dict(LifecycleConfig)[self.sets].default if self.sets else None)
        return None if default == frozenset() else default


def _flag(name: str, help: str, sets: str | None = None, default: bool | None = False) -> _Option:
    keywords: dict[str, Any] = {"action": BooleanOptionalAction}
    return _Option(name, help, sets, keywords if sets else {**keywords, "default": default})


def _choice(name: str, choices: tuple[str, ...], help: str, sets: str | None = None, **keywords: Any) -> _Option:
    return _Option(name, help, sets, {"choices": choices, **keywords})


_KEEPABLE = tuple(sorted(region.value for region in KEEPABLE))

_OPTIONS = (
    _flag(
        "--offload-train",
        "Let the training actor sleep while the rollout engines generate (default: where --offload or --colocate is "
        "set).",
        default=None,
    ),
    _choice(
        "--offload-train-target",
        ("cpu", "disk"),
        "Where the copies of a sleeping actor are: host memory, or files in --offload-train-disk-dir.",
        default="cpu",
    ),
    _Option(
        "--offload-train-disk-dir",
        "Directory for the copies of a sleeping actor, needed with --offload-train-target disk; a file system in "
        "memory defeats it (default: none).",
        keywords={"metavar": "PATH"},
    ),
    _Option(
        "--train-memory-margin-bytes",
        "Bytes of device memory that must stay free when a waking actor takes its memory back.",
        "memory_margin_bytes",
        {"type": int, "metavar": "BYTES"},
    ),
    _flag(
        "--clear-quantized-weight-workspaces-on-offload",
        "Drop quantized copies of weights and other workspaces before a sleep, never under captured CUDA graphs; the "
        "next forward rebuilds them.",
        "drop_workspaces",
    ),
    _flag(
        "--keep-old-actor",
        "Keep the weights that the rollout engines sampled with, as the tag 'old_actor', and as 'rollout_actor' those "
        "that they have now, where every step syncs.",
    ),
    _Option(
        "--ref-update-interval",
        "Let 'ref' be the actor's weights again every so many rollout steps (default: never).",
        keywords={"type": int, "metavar": "STEPS"},
    ),
    _flag(
        "--check-weight-update-equal",
        "Accepted, and always so: a sync compares the fingerprint of each tensor in each engine before that engine may "
        "generate (default: not set, which changes nothing).",
    ),
    _flag(
        "--rematerialize-param-from-master-weight",
        "Refused when set: rebuilding weights from the optimizer's fp32 masters is not built yet.",
    ),
    _choice(
        "--lifecycle-on-untracked",
        ("refuse", "adopt"),
        "Weights that changed behind the controller's back: refuse, or adopt them as a new version.",
        "on_untracked",
    ),
    _choice(
        "--lifecycle-on-abort",
        ("restore", "keep"),
        "A training phase that is aborted: restore the weights from before it, or keep the result as a new version.",
        "on_abort",
    ),
    _choice(
        "--lifecycle-when-busy",
        ("refuse", "wait"),
        "An event asked for by another thread while one runs: refuse it, or let it wait.",
        "when_busy",
    ),
    _choice(
        "--lifecycle-verify",
        ("always", "sample", "never"),
        "Compare fingerprints before weights are destroyed or published and after they are restored: of all tensors, "
        "of a rotating eighth, or not at all.",
        "verify",
    ),
    _Option(
        "--lifecycle-keep",
        f"Regions that stay on the device while the actor sleeps, out of {', '.join(_KEEPABLE)} (default: none).",
        "keep",
        {"nargs": "+", "choices": _KEEPABLE, "metavar": "REGION"},
    ),
    _Option(
        "--lifecycle-journal",
        "File for the journal, one JSON document a line (default: in memory alone).",
        "journal",
        {"metavar": "PATH"},
    ),
    _Option(
        "--lifecycle-journal-records",
        "How many records of the journal are kept in memory.",
        "journal_records",
        {"type": int, "metavar": "COUNT"},
    ),
    _Option(
        "--lifecycle-rest-on-disk",
        "Directory for the copies of what is neither weights nor optimizer state (default: with the other copies).",
        "rest_on_disk",
        {"metavar": "PATH"},
    ),
    _flag(
        "--lifecycle-protect-copies",
        "Map complete host copies read-only, so that a stray write ends the process at once.",
        "protect_copies",
    ),
)

_BY_DEST = {option.dest: option for option in _OPTIONS}

#: Options whose machinery does not exist: why, and what to do instead.
_REFUSED = {
    "rematerialize_param_from_master_weight": (
        "weights can not be rebuilt from the optimizer's fp32 masters yet, so weights that were dropped for it would "
        "be lost. Leave it out: a sleep makes one host copy of each distinct set of weights, and none where there is "
        "one already; --offload-train-target disk moves those copies out of host memory."
    ),
}


def add_lifecycle_arguments(parser: _T) -> _T:
    """Add the argument group "actor lifecycle" to the parser, and return the parser.

    An option whose name or destination the parser has already is left alone, whatever its type and default: it stays
    its owner's, and is read from the namespace all the same. May be called twice. Never raises for a conflict.
    """
    taken = {*parser._option_string_actions, *(action.dest for action in parser._actions)}
    missing = [option for option in _OPTIONS if taken.isdisjoint((*option.spellings, option.dest))]
    if missing:
        group = parser.add_argument_group("actor lifecycle", "When the training actor sleeps, and what is kept then.")
        for option in missing:
            shown = option.help if "(default: " in option.help else f"{option.help} (default: %(default)s)"
            group.add_argument(option.name, **{**option.keywords, "default": option.default, "help": shown})
    return parser


def settings(namespace: Any) -> dict[str, Any]:
    """What the namespace (or mapping) sets of LifecycleConfig, by field; a value of None sets nothing.

    A field ``x`` is read from ``lifecycle_x``, or from the option that gives it. Raises ValueError naming option and
    value for one that can not be used, and for an option whose machinery does not exist; TypeError for what holds no
    options.
    """
    _refuse_unbuilt(namespace)
    found: dict[str, Any] = {}
    for name in fields_dict(LifecycleConfig):
        sources = (f"lifecycle_{name}", *(option.dest for option in _OPTIONS if option.sets == name))
        source = next((source for source in sources if _get(namespace, source) is not None), None)
        if source is not None:
            found[name] = _checked(source, name, _get(namespace, source))
    return found


def wants_offload(namespace: Any) -> bool:
    """Whether the trainer is to call ``sleep()`` and ``wake_up()`` around generation.

    ``offload_train`` where it is set; else whether ``offload`` or ``colocate`` is, as in slime and miles. It is no
    setting of the controller, which sleeps when it is asked to.
    """
    asked = _boolean(namespace, "offload_train")
    return asked if asked is not None else bool(_boolean(namespace, "offload") or _boolean(namespace, "colocate"))


def store_from_args(namespace: Any) -> str:
    """The host store for ``ActorLifecycle(host=...)``: "auto", or "disk:PATH" for ``--offload-train-target disk``.

    Raises ValueError for another target, and for "disk" without a directory.
    """
    target = _get(namespace, "offload_train_target")
    if target in (None, "cpu"):
        return "auto"
    if target != "disk":
        raise ValueError(f"--offload-train-target {target!r}: the targets are 'cpu' and 'disk'")
    path = _get(namespace, "offload_train_disk_dir")
    if not path:
        raise ValueError("--offload-train-target 'disk' needs --offload-train-disk-dir PATH, a directory on a disk")
    return f"disk:{path}"


def tags_from_args(namespace: Any) -> tuple[str, ...]:
    """The tags for ``ActorLifecycle(tags=...)``, as slime and miles choose what they keep:

    - ``ref``: a KL term (``kl_coef`` or ``use_kl_loss``), or ``ref_update_interval``;
    - ``teacher``: on-policy distillation in the trainer (``use_opd`` with ``opd_type`` "megatron");
    - ``old_actor``: ``keep_old_actor``; and ``rollout_actor`` where every step syncs (``update_weights_interval`` 1).
    """
    return tuple(_tags(namespace))


def rotation_from_args(namespace: Any) -> tuple[tuple[str, str], ...]:
    """The moves of tags for ``actor.sync(rotate=...)`` that keep ``old_actor`` at what the samples were drawn with."""
    tags = tags_from_args(namespace)
    if "rollout_actor" in tags:
        return ("old_actor", "rollout_actor"), ("rollout_actor", "actor")
    return (("old_actor", "actor"),) if "old_actor" in tags else ()


def refreshes_ref(namespace: Any, rollout_id: int) -> bool:
    """Whether ``actor.tag("ref", "actor")`` is due after the rollout step of this number, the first being 0."""
    interval = _positive(namespace, "ref_update_interval")
    return interval is not None and (rollout_id + 1) % interval == 0


def _tags(namespace: Any) -> Iterator[str]:
    divergence = _get(namespace, "kl_coef") or _get(namespace, "use_kl_loss")
    if divergence or _positive(namespace, "ref_update_interval") is not None:
        yield "ref"
    if _get(namespace, "use_opd") and _get(namespace, "opd_type") == "megatron":
        yield "teacher"
    if _boolean(namespace, "keep_old_actor"):
        yield "old_actor"
        if _positive(namespace, "update_weights_interval") in (None, 1):
            yield "rollout_actor"


def _refuse_unbuilt(namespace: Any) -> None:
    for dest, reason in _REFUSED.items():
        if _boolean(namespace, dest):
            raise ValueError(f"{_told(dest)} True: {reason}")


def _checked(source: str, name: str, value: Any) -> Any:
    """The value, where LifecycleConfig takes it. Its own errors name the field; people know the option."""
    try:
        LifecycleConfig(**{name: value})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_told(source)} {value!r}: {error.args[0]}") from error
    return value


def _boolean(namespace: Any, dest: str) -> bool | None:
    value = _get(namespace, dest)
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"{_told(dest)} {value!r}: give True or False")


def _positive(namespace: Any, dest: str) -> int | None:
    value = _get(namespace, dest)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"{_told(dest)} {value!r}: give a number of steps, 1 or more")


def _get(namespace: Any, dest: str) -> Any:
    if isinstance(namespace, Mapping):
        return namespace.get(dest)
    if namespace is None or (
        isinstance(namespace, _NO_NAMESPACE) and not hasattr(namespace, "_fields")
    ):  # a named tuple
        raise TypeError(
            f"{namespace!r} ({type(namespace).__name__}) holds no options: give what parser.parse_args() returns, "
            "another object whose attributes are options, or a mapping; for the default settings LifecycleConfig()"
        )
    return getattr(namespace, dest, None)


def _told(dest: str) -> str:
    """How a person wrote it."""
    return f"--{dest.replace('_', '-')}"
