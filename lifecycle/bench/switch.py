"""A switch from changed weights to a version with a host copy: all bytes out, as many in.

Beside it the same copies one after the other and both at once, and the ways in use today.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from attrs import frozen

from lifecycle.bench import peers
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.model import random_weights
from lifecycle.bench.peers import NAIVE, PER_TENSOR, SAVER_DEFAULT, PairSwitch
from lifecycle.bench.result import Accepted, Bar, Group, Result, bar, by_length
from lifecycle.bench.shapes import llama_shapes
from lifecycle.bench.subject import Options, Subject, Watch, attached, device_here
from lifecycle.bench.timing import Peak, Times, Turn, in_turns, peak_memory
from lifecycle.memory.moves import CHUNK

_OURS, _SEQUENTIAL, _AT_ONCE = "ours", "plain pinned copies, one after the other", "plain pinned copies, both at once"
_SLOW = (SAVER_DEFAULT, NAIVE)
_FASTER = 1.55

Found = Mapping[str, Mapping[str, Times]]


@frozen(eq=False)
class _Setup:
    subject: Subject
    watch: Watch
    turns: Mapping[str, Turn]
    left_out: tuple[str, ...]


def measure(options: Options) -> Result:
    """Needs eleven times the bytes in host memory and ten times on the device, where all peers are there."""
    with attached(options, ("ref",)) as subject:
        subject.actor.sleep()  # the copy that 'ref' keeps
        subject.actor.wake_up()
        setup = _set_up(subject)
        in_turns({name: turn for name, turn in setup.turns.items() if not turn.once}, 1)  # buffers, locked pages
        setup.watch.seen.clear()
        found = in_turns(setup.turns, options.rounds, options.rest)
        return _result(options, setup, found, _peak(subject))


def _set_up(subject: Subject) -> _Setup:
    watch = Watch(subject.actor)
    pairs, left_out = _pairs(subject)
    turns = {_OURS: _our_turn(subject, watch), **_plain_turns(subject), **pairs}
    return _Setup(subject, watch, turns, left_out)


def _our_turn(subject: Subject, watch: Watch) -> Turn:
    actor = subject.actor

    def dirty() -> None:
        subject.land()  # of the switch back, a round ago
        subject.make_dirty()
        watch.start()

    steps = {"switch": partial(actor.switch, "ref"), "back": partial(actor.switch, "actor")}
    return Turn(steps, dirty, watch.stop)


def _plain_turns(subject: Subject) -> dict[str, Turn]:
    nbytes, device = subject.nbytes, device_here()
    tensors = list(random_weights(llama_shapes(nbytes), device).values())
    out, into = (peers.host_buffer(max(nbytes, peers.host_bytes(tensors))) for _ in range(2))
    both = peers.BothWays(peers.Link(nbytes, device, out), peers.Link(nbytes, device, into))
    backup, restore = peers.TensorCopies(tensors, out), peers.TensorCopies(tensors, into)

    def per_tensor() -> None:
        backup.out()
        restore.into()

    return {
        _SEQUENTIAL: Turn({"switch": both.one_after_the_other}),
        _AT_ONCE: Turn({"switch": both.at_once}),
        PER_TENSOR: Turn({"switch": per_tensor}),
    }


def _pairs(subject: Subject) -> tuple[dict[str, Turn], tuple[str, ...]]:
    """The peers that keep two sets of weights and put one of them to sleep."""
    nbytes, device = subject.nbytes, device_here()
    makers = (peers.saver_peers, peers.naive_peers)
    turns: dict[str, Turn] = {}
    left_out: tuple[str, ...] = ()
    for make in makers:
        (shown, reason), (other, _) = make(nbytes, device), make(nbytes, device)
        left_out += reason
        turns |= {n: Turn({"switch": PairSwitch(shown[n], other[n]).switch}, once=n in _SLOW) for n in shown}
    return turns, left_out


def _peak(subject: Subject) -> Peak:
    """Of one more dirty switch, which is not timed."""
    subject.make_dirty()
    subject.land()
    with peak_memory() as peak:
        subject.actor.switch("ref")
    subject.actor.switch("actor")
    return peak


def _result(options: Options, setup: _Setup, found: Found, peak: Peak) -> Result:
    nbytes, sequential = setup.subject.nbytes, found[_SEQUENTIAL]["switch"].done
    ratio = sequential / found[_OURS]["switch"].done
    figures = {
        "weights_bytes": nbytes,
        "faster_than_one_after_the_other": ratio,
        "bytes_per_s_both_ways": 2 * nbytes / found[_OURS]["switch"].done,
        "peak_extra_device_bytes": peak.to_plain(),
        "effects": {step: setup.watch.split(step) for step in ("switch", "back")},
        "times": {name: {step: one.to_plain() for step, one in steps.items()} for name, steps in found.items()},
    }
    settings = {**options.to_plain(), "backend": setup.subject.actor.memory.name, "chunk_bytes": CHUNK}
    accepted: tuple[Accepted, ...] = ()
    if device_here().type == "cuda":
        accepted = (
            Accepted("3: dirty switch, faster than the two copies one after the other", ">=", _FASTER, ratio, "times"),
            Accepted("3: extra device memory, by torch's allocator", "<=", CHUNK, peak.allocated, "B"),
            Accepted("3: extra device memory, as the driver saw it", "<=", CHUNK, peak.driver, "B"),
        )
    notes = () if accepted else ("without CUDA nothing is judged, and both ways at once is one after the other",)
    return Result("switch", machine_facts(), settings, (_group(found),), figures, accepted, setup.left_out, notes)


def _group(found: Found) -> Group:
    bars: list[Bar] = []
    for name, steps in found.items():
        if name != _AT_ONCE:
            note = "one round" if name in _SLOW else ""
            bars.append(bar(name, "ours" if name == _OURS else "peer", steps["switch"], note))
    limit = found[_AT_ONCE]["switch"].done
    return Group("switch from changed weights to others", "s", by_length(bars), limit, _AT_ONCE)
