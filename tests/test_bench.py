"""`lifecycle bench` without a GPU: what is measured is really done, and what is told is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lifecycle import LifecycleError, MissingExtra
from lifecycle.bench import commands, pace, timing
from lifecycle.bench.all import Bench, _run
from lifecycle.bench.result import Accepted, Bar, Group, Result, by_length, from_plain
from lifecycle.bench.timing import Times, Took, Turn, in_turns, peak_memory, timed
from lifecycle.cli import app

SMALL = ("--gib", "0.002", "--rounds", "2", "--rest", "0")


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def measured(*arguments: str) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(name="memory", scope="module")
def _memory():
    return measured("memory", *SMALL)


def bars(result: dict, title: str) -> dict[str, dict]:
    return {bar["name"]: bar for group in result["groups"] if group["title"] == title for bar in group["bars"]}


def test_memory_copies_what_has_no_copy_and_nothing_else(memory):
    """A dirty sleep copies all weights out, a sleep with a current copy none; each wake copies all in."""
    effects, nbytes = memory["figures"]["effects"], memory["figures"]["weights_bytes"]

    assert effects["dirty sleep"]["copy_out_weights"]["nbytes"] >= nbytes
    assert "copy_out_weights" not in effects["clean sleep"]
    assert effects["clean wake"]["restore_weights"]["nbytes"] >= nbytes
    assert effects["dirty wake"]["restore_weights"]["nbytes"] >= nbytes


def test_memory_collects_no_garbage_where_nothing_was_dropped(memory):
    """Python's collector is not run by a sleep that drops nothing."""
    assert memory["figures"]["garbage_collections_in_a_clean_sleep"] == 0


def test_memory_tells_every_round_and_every_peer_that_it_left_out(memory):
    """Medians come with their rounds; peers that need CUDA are named; without CUDA nothing is judged."""
    ours = bars(memory, "sleep, host copy current")["ours"]

    assert len(ours["values"]) == 2
    assert min(ours["values"]) <= ours["median"] <= max(ours["values"])
    assert [reason.split(":")[0] for reason in memory["left_out"]] == [
        "torch-memory-saver's backups",
        ".to() per parameter",
    ]
    assert memory["accepted"] == []
    assert memory["machine"]["gpu"] is None


def test_memory_limits_are_of_the_same_run(memory):
    """The limit of a dirty sleep is the plain copy and the bare pause that were timed beside it."""
    times = memory["figures"]["times"]
    (limit,) = (g["limit"] for g in memory["groups"] if g["title"] == "sleep, weights on the device alone")

    expected = times["plain pinned copy"]["sleep"]["median"] + times["bare pause and resume"]["sleep"]["median"]
    assert limit == pytest.approx(expected)


def took(*seconds: float) -> Times:
    return Times(tuple(Took(one / 2, one) for one in seconds))


def judged(clean: float = 0.012, dirty: float = 0.165, wake: float = 0.166, collections: int = 0) -> dict[str, bool]:
    """The memory lines for these seconds: 8 GB at 50 GB/s is 0.16 s, ours copies as quickly, the saver takes 0.18 s."""
    from lifecycle.bench import memory
    from lifecycle.bench.subject import Effect, Seen, Watch

    nbytes = 8 * 10**9
    out, into = Effect(0.16, nbytes, "device_to_host"), Effect(0.001, nbytes, "host_to_device")
    watch = Watch(actor=None)
    watch.seen = {
        "dirty sleep": [Seen({"copy_out_weights": out}, 0.16, 0.0)],
        "dirty wake": [Seen({"restore_weights": into}, 0.0, 0.16)],
    }
    found = {
        memory._CLEAN: {"sleep": took(clean), "wake": took(wake)},
        memory._DIRTY: {"sleep": took(dirty), "wake": took(wake)},
        memory._BARE: {"sleep": took(0.002), "wake": took(0.002)},
        memory.PLAIN: {"sleep": took(0.16), "wake": took(0.16)},
        memory.SAVER_RETAINED: {"sleep": took(0.18), "wake": took(0.18)},
    }
    setup = memory._Setup(None, watch, SimpleNamespace(nbytes=nbytes), {}, ())
    return {line.line: line.ok for line in memory._accepted(setup, found, collections)}


def test_memory_lines_are_held():
    lines = judged()

    assert len(lines) == 7
    assert all(lines.values())


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"clean": 0.016}, "1: sleep with a current host copy"),
        ({"clean": 0.0181}, "1: faster than the memory saver, backup retained"),
        ({"collections": 1}, "1: garbage collections on this path"),
        ({"dirty": 0.168}, "2: dirty sleep, whole, against its copies + bare + 5 ms"),
        ({"wake": 0.168}, "2: dirty wake, whole, against its copies + bare + 5 ms"),
    ],
)
def test_memory_lines_are_missed(change, missed):
    """Each by what it is about."""
    assert judged(**change)[missed] is False


@pytest.mark.parametrize(
    ("streamed", "first", "held"), [(0.21, 0.03, [True] * 4), (0.25, 0.04, [False, False, True, True])]
)
def test_wake_lines(streamed, first, held):
    """Copy 0.16 s, forward 0.19 s, resume 0.01 s: at most 0.2114 s; the first block's bytes take 0.02 s."""
    from lifecycle.bench import wake

    found = {
        wake._STREAMED: {"forward": took(streamed)},
        "first block": {"wake": Times((Took(first, first),))},
        wake._FORWARD: {"forward": took(0.19)},
    }
    lines = wake._accepted(found, 0.01 + 1.06 * 0.19, 0.032, 0.19 / 0.16)

    assert [line.ok for line in lines] == held


def test_switch_moves_all_bytes_out_and_as_many_in():
    """Each timed switch leaves changed weights for others, and the way back restores once."""
    result = measured("switch", *SMALL)
    effects, nbytes = result["figures"]["effects"], result["figures"]["weights_bytes"]

    assert effects["switch"]["copy_out_weights"]["nbytes"] >= nbytes
    assert effects["switch"]["restore_weights"]["nbytes"] >= nbytes
    assert "copy_out_weights" not in effects["back"]
    assert set(bars(result, "switch from changed weights to others")) == {
        "ours",
        "plain pinned copies, one after the other",
        "pinned copy per tensor, every time",
    }


def test_wake_compares_the_forward_behind_it_in_three_ways():
    """The streamed one, on the stream, and one after the other; all gave the logits from before, or it would fail."""
    result = measured("wake", *SMALL)

    ours = [name for name, bar in bars(result, "wake and forward").items() if bar["role"] == "ours"]
    assert ours == ["ours, streamed", "ours, on the stream", "ours, waited for, then the forward"]
    assert result["figures"]["first_block_bytes"] < result["figures"]["weights_bytes"] / 2


def test_wake_fails_where_the_forward_read_other_weights(monkeypatch):
    """Logits that differ from those before the sleep are no result, unless they differ from call to call."""
    from lifecycle.bench import wake

    rounds = iter(range(10**6))

    def differ(one, other):
        return next(rounds) % 4 == 3  # the fourth forward of each round is the one without a wake

    monkeypatch.setattr(wake.torch, "equal", differ)
    done = run("wake", "--gib", "0.002", "--rounds", "1", "--rest", "0")

    assert isinstance(done.exception, RuntimeError)
    assert "read other weights after: ours, on the stream, ours, streamed, ours, waited for" in str(done.exception)


def test_wake_says_where_a_forward_is_not_repeatable(monkeypatch):
    from lifecycle.bench import wake

    monkeypatch.setattr(wake.torch, "equal", lambda one, other: False)

    assert any("prove nothing" in note for note in measured("wake", *SMALL)["notes"])


def test_fingerprint_has_the_shape_of_the_others():
    """Its own figures are in it, the sum of one tensor is its limit."""
    result = measured("fingerprint", "--gib", "0.002", "--rounds", "2")

    assert result["groups"][0]["limit"] == result["figures"]["sum_flat_s"]
    assert result["figures"]["differing"] == []


def test_pinning_needs_a_gpu():
    """Without one it says so, and nothing is measured."""
    done = run("pinning")

    assert isinstance(done.exception, LifecycleError)
    assert "needs a CUDA device" in str(done.exception)


def test_workspaces_need_transformer_engine(monkeypatch):
    """Without it the extra is named."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    done = run("workspaces")

    assert isinstance(done.exception, MissingExtra)
    assert "transformer_engine" in str(done.exception)


def test_turns_begin_with_another_one_each_round():
    """Order alternates, steps are in order, slow ones run once, and what is outside is not timed."""
    log: list[str] = []

    def turn(name: str, once: bool = False) -> Turn:
        steps = {step: partial(log.append, f"{name}.{step}") for step in ("down", "up")}
        return Turn(steps, lambda: log.append(f"before {name}"), lambda step: log.append(f"after {step}"), once)

    found = in_turns({"a": turn("a"), "b": turn("b"), "slow": turn("slow", once=True)}, 2)

    begun = [entry for entry in log if entry.startswith("before")]
    assert begun == ["before a", "before b", "before slow", "before b", "before a"]
    assert log[:5] == ["before a", "a.down", "after down", "a.up", "after up"]
    assert [len(found[name]["up"].rounds) for name in found] == [2, 2, 1]


def test_turns_rest_before_every_step_and_do_not_time_it(monkeypatch):
    """But not before those that come at once, nor before what is outside of the steps."""
    log: list[str] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        log.append("rest")
        now[0] += seconds

    def step(name: str):
        log.append(name)
        now[0] += 1.0

    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=sleep, perf_counter=lambda: now[0]))
    steps = {name: partial(step, name) for name in ("down", "up", "again")}
    turn = Turn(steps, lambda: log.append("before"), lambda name: log.append("each"), at_once=("up",))
    found = in_turns({"a": turn}, 1, 5.0)

    assert log == ["before", "rest", "down", "each", "up", "each", "rest", "again", "each"]
    assert {name: times.done for name, times in found["a"].items()} == {"down": 1.0, "up": 1.0, "again": 1.0}


def test_the_pace_is_told_beside_what_is_timed(monkeypatch):
    """Times the best so far, of real work; without a rest nothing is measured beside it."""
    told = iter([1.0, 2.0, 0.5, 1.0])
    assert 0 < pace.work() < 1
    monkeypatch.setattr(pace, "work", lambda: next(told))
    turn = Turn({"down": lambda: None, "up": lambda: None}, at_once=())

    found = in_turns({"a": turn}, 2, 0.001)
    assert [took.pace for step in ("down", "up") for took in found["a"][step].rounds] == [1.0, 1.0, 2.0, 2.0]
    assert [took.pace for took in in_turns({"a": turn}, 1)["a"]["up"].rounds] == [1.0]
    assert found["a"]["up"].to_plain()["rounds"][0]["pace"] == 2.0


def test_a_call_is_done_no_sooner_than_it_returns():
    took = timed(lambda: sum(range(1000)))

    assert 0 < took.returned <= took.done


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_without_a_device_no_memory_is_taken_on_it():
    with peak_memory() as peak:
        bytearray(1000)

    assert peak.to_plain() == {"allocated": 0, "driver": 0}


def sample(got: float = 12.0) -> Result:
    group = Group(
        "a title", "s", [Bar("ours", "ours", [0.2, 0.1, 0.4]), Bar("peer", "peer", [7.0], "one round")], 0.1, "x"
    )
    line = Accepted("1: a promise", ">=", 10.0, got, "times")
    machine = {"gpu": "a GPU", "cores": 2, "torch": "2", "date": "2026-01-02T03:04:05+00:00"}
    return Result("memory", machine, {"gib": 8.0}, (group,), {"x": 1}, (line,), ("a peer: why",), ("a note",))


def test_a_result_can_be_read_back():
    """What --json prints is the whole result."""
    result = sample()

    assert from_plain(json.loads(json.dumps(result.to_plain()))) == result


def test_what_is_no_result_is_refused(tmp_path):
    """A document of something else is named, and what it lacks."""
    document = tmp_path / "other.json"
    plain = sample().to_plain()
    for wrong in ({"bench": "memory"}, {**plain, "machine": {}}, {**plain, "accepted": ["x"]}, []):
        document.write_text(json.dumps(wrong))
        done = run("draw", str(document))

        assert done.exit_code == 2
        assert "no result of" in " ".join(done.output.replace("│", " ").split())


def test_a_result_without_bars_is_not_drawn_from_its_document(tmp_path):
    """It is one of `lifecycle bench`, and what can be done about it is said."""
    document = tmp_path / "overhead.json"
    document.write_text(json.dumps({"ratio": 7.9, "rounds": 3000}))
    done = run("draw", str(document))

    assert done.exit_code == 2
    assert "`overhead` is drawn while it is measured" in " ".join(done.output.replace("│", " ").split())


def test_a_picture_that_can_not_be_written_is_refused(tmp_path):
    """Before anything is measured, and never in the place of the document itself."""
    document = tmp_path / "result.svg"
    text = json.dumps(sample().to_plain())
    document.write_text(text)
    (tmp_path / "folder.svg").mkdir()

    for picture in (document, tmp_path / "folder.svg", tmp_path / "nowhere" / "x.svg"):
        assert run("draw", str(document), "--picture", str(picture)).exit_code == 2
    assert document.read_text() == text


@pytest.mark.parametrize(("operator", "got", "ok"), [("<=", 1.0, True), ("<=", 1.1, False), (">=", 0.9, False)])
def test_a_line_is_held_or_not(operator, got, ok):
    assert Accepted("a line", operator, 1.0, got).ok is ok


def test_ours_comes_first_and_then_the_quickest():
    found = by_length([Bar("slow", "peer", [3.0]), Bar("ours", "ours", [2.0]), Bar("quick", "peer", [1.0])])

    assert [bar.name for bar in found] == ["ours", "quick", "slow"]


@pytest.mark.parametrize(("got", "told", "code"), [(12.0, "yes", 0), (9.0, "NO", 1)])
def test_strict_exits_with_1_where_a_line_was_not_reached(monkeypatch, got, told, code):
    """Otherwise a missed ratio is told, and no failure."""
    monkeypatch.setattr("lifecycle.bench.memory.measure", lambda options: sample(got))
    done, strict = run("memory"), run("memory", "--strict")

    assert (done.exit_code, strict.exit_code) == (0, code)
    assert told in done.stdout
    for text in ("a title", "200 ms", "7.00 s", "one round", "limit: x", "left out: a peer: why", "a note"):
        assert text in done.stdout


def test_all_go_on_after_one_that_fails(tmp_path):
    """Each in a process of its own; files of what was measured, and the reason of what was not."""
    command = [sys.executable, "-m", "lifecycle.bench.all", "--output", str(tmp_path), "--gib", "0.002"]
    done = subprocess.run([*command, "--only", "pinning,fingerprint"], capture_output=True, text=True)

    assert done.returncode == 1
    assert "== fingerprint: measured" in done.stdout
    assert "== pinning: failed with exit status 2: lifecycle bench pinning measures" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "fingerprint.json",
        "fingerprint.txt",
        "fingerprint.svg",
        "pinning.err",
    }


def test_all_stop_one_that_takes_too_long(tmp_path):
    outcome = _run(Bench("memory", 1.0, seconds=0.3), tmp_path, 0.002)

    assert outcome.ended == "stopped after 0 s"
    assert not outcome.measured


def test_all_name_what_they_do_not_know():
    done = subprocess.run(
        [sys.executable, "-m", "lifecycle.bench.all", "--output", "x", "--only", "memroy"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "memroy" in done.stderr


def test_every_measurement_is_one_of_all():
    """What `all` runs are commands, and of the commands only the checker's and the drawing are left out."""
    from lifecycle.bench.all import NAMES

    known = {(command.name or command.callback.__name__) for command in commands.bench.registered_commands}
    assert set(NAMES) == known - {"check", "draw"}
