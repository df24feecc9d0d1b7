"""Pieces of memory that weights are cut from: how they are filled, that they are taken, how a pool of them is timed."""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lifecycle import LifecycleError
from lifecycle.bench import pieces, saver, timing
from lifecycle.bench.model import random_weights
from lifecycle.bench.packing import Memory, cut
from lifecycle.bench.shapes import llama_shapes
from lifecycle.bench.subject import Options
from lifecycle.cli import app

MIB = 1 << 20
CPU = torch.device("cpu")
STACK = (32, 0.125)  # layers, and the vocabulary in hidden sizes, of the model of `bench wake`


def large(shapes: dict[str, tuple[int, ...]], names: tuple[str, ...]) -> list[int]:
    """Bytes of those that torch cuts from pieces."""
    sizes = [2 * torch.Size(shapes[name]).numel() for name in names]
    return [-(-size // 512) * 512 for size in sizes if size > MIB]


@pytest.mark.parametrize("kind", ["tensor", "layer", "model", "32", "64", "100", "2048"])
@pytest.mark.parametrize("model", [(), STACK])
def test_every_tensor_is_in_one_piece_in_its_order(kind, model):
    """With as much reserved as its tensors take; nothing where torch takes memory for each."""
    shapes = llama_shapes(2**30, *model)
    found = cut(kind, shapes)

    assert [name for piece in found for name in piece.names] == list(shapes)
    for piece in found:
        assert piece.reserve == (0 if kind == "tensor" else sum(large(shapes, piece.names)))


def test_a_layer_is_a_piece():
    """Embedding, last norm and head are none's."""
    found = cut("layer", llama_shapes(2**30))

    assert len(found) == 18 + 3
    assert {name.split(".")[2] for name in found[4].names} == {"3"}
    assert found[0].names == ("model.embed_tokens.weight",)


@given(st.integers(2**27, 2**34), st.integers(32, 1024), st.sampled_from([(), STACK]))
def test_pieces_of_a_size_are_filled_as_far_as_whole_tensors_go(nbytes, size, model):
    """None is larger, but for one tensor that is; and what begins a piece did not fit in the one before."""
    shapes = llama_shapes(nbytes, *model)
    filled = [large(shapes, piece.names) for piece in cut(str(size), shapes)]

    assert all(sum(tensors) <= size * MIB or len(tensors) == 1 for tensors in filled)
    for before, after in pairwise(filled):
        assert sum(before) + after[0] > size * MIB


@pytest.mark.parametrize("size", ["32", "64", "128", "256", "512", "1024", "2048"])
@pytest.mark.parametrize("model", [(), STACK])
def test_little_of_the_memory_is_left_unused(size, model):
    """Torch takes whole 2 MiB, and 20 for less than 10."""
    shapes = llama_shapes(2**33, *model)
    needed = sum(large(shapes, tuple(shapes)))
    taken = sum(
        -(-piece.reserve // (2 * MIB)) * 2 * MIB if piece.reserve >= 10 * MIB else 20 * MIB
        for piece in cut(size, shapes)
        if piece.reserve
    )

    assert needed <= taken <= 1.02 * needed


@pytest.mark.parametrize("kind", ["layer", "model", "32"])
def test_tensors_are_allocated_inside_of_their_piece(monkeypatch, kind):
    """Each piece is reserved when those before are filled, and the values are those without pieces."""
    log: list[object] = []
    empty = torch.empty

    @contextmanager
    def region(reserve: int):
        log.append(reserve)
        yield
        log.append("left")

    def allocated(shape, **where):
        log.append(tuple(shape))
        return empty(shape, **where)

    monkeypatch.setattr(torch, "empty", allocated)
    found = random_weights(llama_shapes(2**27), CPU, memory=Memory(kind, region))
    expected = random_weights(llama_shapes(2**27), CPU)

    shapes = llama_shapes(2**27)
    inside = [[piece.reserve, *(shapes[name] for name in piece.names), "left"] for piece in cut(kind, shapes)]
    assert log[: sum(map(len, inside))] == [entry for entries in inside for entry in entries]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("command", ["memory", "switch", "wake"])
@pytest.mark.parametrize("wrong", ["31", "sixty", "-64", "64.5", ""])
def test_other_pieces_are_a_usage_error(command, wrong):
    """That lists what can be."""
    done = CliRunner().invoke(app, ["bench", command, f"--pieces={wrong}"])

    assert done.exit_code == 2
    told = " ".join(done.output.replace("│", " ").split())
    assert f"pieces={wrong}: known are tensor, layer, model, and MiB from 32 on, like 64" in told


@pytest.mark.parametrize("command", ["memory", "switch", "wake"])
def test_the_settings_tell_pieces_and_rest(command):
    arguments = ["--gib", "0.001", "--rounds", "1", "--rest", "0.001", "--pieces", "64", "--json"]
    done = CliRunner().invoke(app, ["bench", command, *arguments])

    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)["settings"]
    assert (settings["pieces"], settings["rest"]) == ("64", 0.001)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is CUDA")
def test_without_cuda_there_are_no_pieces_to_measure():
    with pytest.raises(LifecycleError, match="there is no CUDA device"):
        pieces.measure(Options(0.25))


class Recorder:
    """In the saver's place, which needs CUDA: what it is told, and which pools are mapped."""

    def __init__(self) -> None:
        self.mapped: set[str] = set()
        self.log: list[tuple[str, str]] = []

    @contextmanager
    def allocating(self, tag: str, backup: bool):
        assert not backup
        self.resume(tag)
        yield self

    def pause(self, tag: str) -> None:
        self.mapped.remove(tag)  # one that is paused must not be paused again
        self.log.append(("pause", tag))

    def resume(self, tag: str) -> None:
        assert not self.mapped  # there is room for one beside the link's
        self.mapped.add(tag)
        self.log.append(("resume", tag))


@pytest.fixture(name="recorder")
def _recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(saver, "missing_saver", lambda: None)
    monkeypatch.setattr(saver, "allocating", recorder.allocating)
    monkeypatch.setattr(pieces, "device_here", lambda: CPU)
    return recorder


def test_pools_take_turns_and_only_one_is_mapped(recorder, monkeypatch):
    """Each comes and goes three times a round; one copy follows the pause at once, the other after a rest."""
    monkeypatch.setattr(pieces, "SIZES", (32, 64, 128))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: recorder.log.append(("rest", str(seconds))))
    result = pieces.measure(Options(0.09375, rounds=2, rest=0.5)).to_plain()

    assert recorder.mapped == set()
    one = f"bench-pieces-{32 * MIB}"
    first = recorder.log.index(("rest", "0.5"))
    rest, resume, pause = ("rest", "0.5"), ("resume", one), ("pause", one)
    assert recorder.log[first : first + 9] == [rest, resume, rest, pause, resume, pause, rest, resume, pause]
    assert recorder.log.count(resume) == 1 + 2 * 3
    assert {name: (found["count"], found["piece_bytes"]) for name, found in result["figures"]["pieces"].items()} == {
        "pieces of 32 MiB": (3, 32 * MIB),
        "pieces of 64 MiB": (2, 64 * MIB),
        "all in one": (1, 96 * MIB),
    }
    assert [(group["title"], group["limit_name"]) for group in result["groups"]] == [
        ("bare pause", ""),
        ("bare resume", ""),
        ("resume and copy right behind a pause", "plain pinned copy"),
        ("resume and copy after a rest", "plain pinned copy"),
    ]
    assert all(len(bar["values"]) == 2 for group in result["groups"] for bar in group["bars"])
    assert result["settings"] == {"gib": 0.09375, "rounds": 2, "rest": 0.5}


def test_a_copy_fills_every_piece(recorder):
    """Also the last one, which may be smaller."""
    host = torch.arange(100, dtype=torch.uint8)
    pool = pieces._paused_pool("a pool", (32, 32, 32, 4), host)
    pool.resume_and_copy()

    assert torch.equal(torch.cat(pool.pieces), host)
