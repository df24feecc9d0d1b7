"""Options for trainers on argparse: added, found where a trainer has them already, read, and refused."""

from __future__ import annotations

import re
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import namedtuple
from pathlib import Path

import pytest
from attrs import asdict, fields_dict
from torch import nn

from lifecycle import ActorLifecycle, LifecycleConfig
from lifecycle.arguments import (
    add_lifecycle_arguments,
    refreshes_ref,
    rotation_from_args,
    store_from_args,
    tags_from_args,
    wants_offload,
)
from lifecycle.testing.engines import FakeEngine
from states.resources import Region

ROOT = Path(__file__).parents[1]

#: Every field of LifecycleConfig: how it is written, and the value that it then has.
WRITTEN = {
    "on_untracked": (["--lifecycle-on-untracked", "adopt"], "adopt"),
    "on_abort": (["--lifecycle-on-abort", "keep"], "keep"),
    "when_busy": (["--lifecycle-when-busy", "wait"], "wait"),
    "verify": (["--lifecycle-verify", "sample"], "sample"),
    "memory_margin_bytes": (["--train-memory-margin-bytes", "1073741824"], 1 << 30),
    "keep": (["--lifecycle-keep", "grads", "optimizer"], {Region.GRADS, Region.OPTIMIZER}),
    "journal": (["--lifecycle-journal", "run/journal.jsonl"], "run/journal.jsonl"),
    "journal_records": (["--lifecycle-journal-records", "7"], 7),
    "rest_on_disk": (["--lifecycle-rest-on-disk", "/scratch"], "/scratch"),
    "protect_copies": (["--lifecycle-protect-copies"], True),
    "drop_workspaces": (["--no-clear-quantized-weight-workspaces-on-offload"], False),
}
BOOLEANS = [
    "offload-train",
    "clear-quantized-weight-workspaces-on-offload",
    "keep-old-actor",
    "check-weight-update-equal",
    "rematerialize-param-from-master-weight",
    "lifecycle-protect-copies",
]


def parse(*words: str, parser: ArgumentParser | None = None) -> Namespace:
    return add_lifecycle_arguments(parser or ArgumentParser()).parse_args(list(words))


def trainers_parser(**settings) -> ArgumentParser:
    """A parser with options of its own, as trainers on Megatron define them."""
    parser = ArgumentParser(**settings)
    parser.add_argument("--offload-train", action=BooleanOptionalAction)
    parser.add_argument("--keep-old-actor", action="store_true", help="the trainer's own text")
    parser.add_argument("--ref-update-interval", type=int, default=None)
    parser.add_argument("--check-weight-update-equal", action="store_true")
    parser.add_argument("--train-memory-margin-bytes", type=int, default=1024**3)
    parser.add_argument("--update-weights-interval", type=int, default=1)
    parser.add_argument("--colocate", action="store_true")
    return parser


def test_every_field_has_an_option():
    """A setting that nobody could give on a command line is noticed here."""
    assert WRITTEN.keys() == fields_dict(LifecycleConfig).keys()


def test_nothing_given_is_the_default():
    """A parser of ours without any words, a bare namespace, and an empty mapping are all the default settings."""
    for namespace in (parse(), Namespace(), {}, Namespace(lr=1e-6, lifecycle_verify=None)):
        assert LifecycleConfig.from_args(namespace) == LifecycleConfig()


@pytest.mark.parametrize("name", WRITTEN)
def test_round_trip(name):
    """Each option changes its field, and no other one."""
    words, value = WRITTEN[name]
    expected = {**asdict(LifecycleConfig(), recurse=False), name: value}

    assert asdict(LifecycleConfig.from_args(parse(*words)), recurse=False) == expected
    assert asdict(LifecycleConfig.from_args(vars(parse(*words))), recurse=False) == expected


@pytest.mark.parametrize("name", BOOLEANS)
def test_boolean_options_have_both_forms(name):
    """--x and --no-x, the last one wins."""
    dest = name.replace("-", "_")

    assert getattr(parse(f"--{name}"), dest) is True
    assert getattr(parse(f"--{name}", f"--no-{name}"), dest) is False


def test_the_fields_own_name_is_more_particular():
    """lifecycle_x beside an option for the same field wins."""
    namespace = Namespace(train_memory_margin_bytes=1, lifecycle_memory_margin_bytes=2)

    assert LifecycleConfig.from_args(namespace).memory_margin_bytes == 2


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_options_of_the_trainer_are_left_alone(handler):
    """Type, default and help stay the trainer's, also where argparse would let ours replace them; they are read."""
    parser = trainers_parser(conflict_handler=handler)
    own = list(parser._actions)
    add_lifecycle_arguments(parser)

    assert parser._actions[: len(own)] == own
    assert "the trainer's own text" in parser.format_help()
    namespace = parser.parse_args(["--keep-old-actor", "--colocate", "--lifecycle-on-abort", "keep"])
    assert LifecycleConfig.from_args(namespace) == LifecycleConfig(memory_margin_bytes=1 << 30, on_abort="keep")
    assert tags_from_args(namespace) == ("old_actor", "rollout_actor")
    assert wants_offload(namespace)
    assert not wants_offload(parser.parse_args(["--colocate", "--no-offload-train"]))


def test_a_destination_of_the_trainer_is_left_alone():
    """An option spelt otherwise, but for the same attribute, is the trainer's word on it."""
    parser = ArgumentParser()
    parser.add_argument("--drop-old-actor", dest="keep_old_actor", action="store_false")
    parser.add_argument("--no-offload-train", dest="sleepless", action="store_true")
    add_lifecycle_arguments(parser)

    assert tags_from_args(parser.parse_args([])) == ("old_actor", "rollout_actor")
    assert "--keep-old-actor" not in parser.format_help()
    assert not hasattr(parser.parse_args([]), "offload_train")


def test_adding_twice_changes_nothing():
    """The second call finds every option there."""
    parser = add_lifecycle_arguments(ArgumentParser())
    before = parser.format_help()

    assert add_lifecycle_arguments(parser).format_help() == before


def test_help_tells_units_defaults_and_both_forms():
    """Each option says its default; numbers say what they count."""
    parser = add_lifecycle_arguments(ArgumentParser(prog="train", add_help=False))
    text = " ".join(parser.format_help().split())

    assert "actor lifecycle:" in text
    assert [action.dest for action in parser._actions if "(default: " not in (action.help or "")] == []
    assert re.search(r"--train-memory-margin-bytes BYTES Bytes of device memory [^)]* \(default: 0\)", text)
    assert re.search(r"--lifecycle-verify \{always,sample,never\} [^)]* \(default: always\)", text)
    assert re.search(r"--no-clear-quantized-weight-workspaces-on-offload Drop [^)]* \(default: True\)", text)
    assert re.search(r"--ref-update-interval STEPS [^)]* \(default: never\)", text)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"train_memory_margin_bytes": -1}, ["--train-memory-margin-bytes", "-1"]),
        ({"train_memory_margin_bytes": "3GiB"}, ["--train-memory-margin-bytes", "'3GiB'"]),
        ({"train_memory_margin_bytes": True}, ["--train-memory-margin-bytes", "True", "an int, not bool"]),
        ({"lifecycle_verify": "sometimes"}, ["--lifecycle-verify", "'sometimes'", "'sample'"]),
        ({"lifecycle_keep": ["weights"]}, ["--lifecycle-keep", "weights", "optimizer"]),
        ({"lifecycle_journal_records": 0}, ["--lifecycle-journal-records", "0", "1 or more"]),
        ({"lifecycle_journal_records": 10**30}, ["--lifecycle-journal-records", "less than 2**63"]),
        ({"lifecycle_journal_records": False}, ["--lifecycle-journal-records", "False", "an int, not bool"]),
        ({"lifecycle_protect_copies": "yes"}, ["--lifecycle-protect-copies", "'yes'"]),
        ({"clear_quantized_weight_workspaces_on_offload": 1}, ["--clear-quantized-weight-workspaces-on-offload", "1"]),
        ({"rematerialize_param_from_master_weight": "false"}, ["--rematerialize-param-from-master-weight", "'false'"]),
    ],
    ids=str,
)
def test_wrong_values_name_the_option(values, told):
    """What a configuration file may hold is refused by the name of the option, with the value."""
    with pytest.raises(ValueError, match=re.escape(told[0])) as refused:
        LifecycleConfig.from_args(values)

    assert all(word in str(refused.value) for word in told)


@pytest.mark.parametrize(
    "given",
    [
        None,
        "--lifecycle-verify never",
        ["--lifecycle-verify"],
        0,
        1j,
        ArgumentParser(),
        ArgumentParser().parse_args,
        LifecycleConfig(verify="never"),
    ],
    ids=type,
)
@pytest.mark.parametrize(
    "read", [LifecycleConfig.from_args, wants_offload, store_from_args, tags_from_args, rotation_from_args]
)
def test_what_holds_no_options_is_refused(read, given):
    """A parser that was not run, or nothing at all, is no namespace in which nothing is set."""
    with pytest.raises(TypeError, match=rf"\({type(given).__name__}\) holds no options: give what parser.parse_args"):
        read(given)


def test_rebuilding_from_masters_is_refused_with_the_reason():
    """The option is parsed, so that the refusal can say why and what to do instead."""
    with pytest.raises(ValueError, match=r"--rematerialize-param-from-master-weight.*fp32 masters.*Leave it out"):
        LifecycleConfig.from_args(parse("--rematerialize-param-from-master-weight"))


def test_words_that_are_no_choice_end_in_a_usage_error(capsys):
    """argparse itself refuses what the help lists as choices."""
    for words in (["--offload-train-target", "tape"], ["--lifecycle-keep", "weights"], ["--lifecycle-verify", "no"]):
        with pytest.raises(SystemExit) as ended:
            parse(*words)
        assert ended.value.code == 2
        assert words[1] in capsys.readouterr().err


def test_the_page_for_trainers():
    """docs/trainers.md: its programs run, one after the other, and what they assert holds; every path is there."""
    page = (ROOT / "docs/trainers.md").read_text(encoding="utf-8")
    programs = re.findall(r"(<!-- not run[^>]*-->\n)?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    for _, program in (one for one in programs if not one[0]):
        exec(compile(program, "docs/trainers.md", "exec"), names)

    assert [bool(marked) for marked, _ in programs] == [False, False, True]
    for _, program in programs:
        compile(program, "docs/trainers.md", "exec")
    named = re.findall(r"`((?:lifecycle|states|docs)/[\w./-]+)`", page)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_names_every_option():
    """An option that is added is explained there."""
    page = (ROOT / "docs/trainers.md").read_text(encoding="utf-8")
    options = [action.option_strings[0] for action in add_lifecycle_arguments(ArgumentParser(add_help=False))._actions]

    assert options
    assert [option for option in options if f"`{option}" not in page] == []


@pytest.mark.parametrize(
    ("namespace", "wanted"),
    [
        ({}, False),
        ({"offload_train": None, "colocate": True}, True),
        ({"offload": True}, True),
        ({"offload_train": False, "colocate": True}, False),
        ({"offload_train": True, "colocate": False}, True),
    ],
    ids=str,
)
def test_whether_to_sleep(namespace, wanted):
    """An explicit word counts; else sharing devices with the engines does."""
    assert wants_offload(namespace) is wanted
    assert wants_offload(Namespace(**namespace)) is wanted


def test_store(tmp_path):
    """Copies go to host memory, or to files in the directory given: an actor really sleeps there."""
    assert store_from_args(parse()) == store_from_args({}) == "auto"
    words = ["--offload-train-target", "disk", "--offload-train-disk-dir", str(tmp_path)]
    store = store_from_args(parse(*words))
    assert store == f"disk:{tmp_path}"
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()

    with ActorLifecycle(model, host=store) as actor:
        actor.sleep()
        assert actor.source("actor").name == "DISK"
        actor.wake_up()
        assert model.weight.equal(before)


def test_a_store_that_can_not_be_is_refused():
    """A disk without a directory, and a target that nobody knows."""
    with pytest.raises(ValueError, match=r"--offload-train-target 'disk' needs --offload-train-disk-dir"):
        store_from_args(parse("--offload-train-target", "disk"))
    with pytest.raises(ValueError, match=r"--offload-train-target 'tape'.*'cpu' and 'disk'"):
        store_from_args({"offload_train_target": "tape"})


@pytest.mark.parametrize(
    ("namespace", "tags", "rotation"),
    [
        ({}, (), ()),
        ({"kl_coef": 0.0, "use_kl_loss": False, "ref_load": "ref"}, (), ()),
        ({"kl_coef": 0.1}, ("ref",), ()),
        ({"use_kl_loss": True}, ("ref",), ()),
        ({"ref_update_interval": 4}, ("ref",), ()),
        ({"use_opd": True, "opd_type": "megatron"}, ("teacher",), ()),
        ({"use_opd": True, "opd_type": "sglang"}, (), ()),
        (
            {"keep_old_actor": True},
            ("old_actor", "rollout_actor"),
            (("old_actor", "rollout_actor"), ("rollout_actor", "actor")),
        ),
        ({"keep_old_actor": True, "update_weights_interval": 2}, ("old_actor",), (("old_actor", "actor"),)),
        (
            {"use_kl_loss": True, "keep_old_actor": True, "update_weights_interval": 2},
            ("ref", "old_actor"),
            (("old_actor", "actor"),),
        ),
    ],
    ids=str,
)
def test_tags_and_their_rotation(namespace, tags, rotation):
    """What slime and miles keep for the same settings, and the moves after each sync."""
    assert tags_from_args(namespace) == tags
    assert rotation_from_args(namespace) == rotation


def test_old_actor_is_what_the_engines_sampled_with():
    """Two syncs with the rotation: old_actor is one behind rollout_actor, which is the actor that was sent."""
    namespace = parse("--keep-old-actor")
    model, engine = nn.Linear(2, 2), FakeEngine("engine")
    with ActorLifecycle(model, tags=tags_from_args(namespace), host="shared") as actor:
        first = actor.tags["actor"]
        actor.sync(engine, rotate=rotation_from_args(namespace))
        with actor.loading("actor"):
            nn.init.ones_(model.weight)
        actor.sync(engine, rotate=rotation_from_args(namespace))

        assert actor.tags["old_actor"] == first
        assert actor.tags["rollout_actor"] == actor.tags["actor"] != first


def test_refreshing_the_reference():
    """After every third step, counted from 0; never where it is not asked for."""
    namespace = parse("--ref-update-interval", "3")

    assert [step for step in range(9) if refreshes_ref(namespace, step)] == [2, 5, 8]
    assert not any(refreshes_ref(parse(), step) for step in range(9))
    for wrong in (0, -1, "3", True):
        with pytest.raises(ValueError, match=f"--ref-update-interval {wrong!r}"):
            refreshes_ref({"ref_update_interval": wrong}, 0)


def test_a_named_tuple_holds_options():
    given = namedtuple("Given", "lifecycle_verify lifecycle_on_abort")("never", None)

    assert LifecycleConfig.from_args(given) == LifecycleConfig(verify="never")
