"""Sleep and wake of one set of weights, beside what else users have and what bounds us, in one run.

Two kinds of sleep: with a current host copy (nothing is copied), and dirty (the weights' only copy is on the device).
A wake of ours may return before the bytes are there; what counts is when they are.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from lifecycle.actions import IN, OUT
from lifecycle.bench import peers
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.peers import NAIVE, PER_TENSOR, PLAIN, SAVER_DEFAULT, SAVER_RETAINED, Peer
from lifecycle.bench.result import Accepted, Bar, Group, Result, Role, amount, bar, by_length
from lifecycle.bench.subject import Options, Subject, Watch, attached, device_here
from lifecycle.bench.timing import Times, Turn, in_turns

_CLEAN, _DIRTY, _BARE = "ours, host copy current", "ours, dirty", "bare pause and resume"
_SLOW = (SAVER_DEFAULT, NAIVE)
_SLACK = 0.005  # seconds that an event may take beside its copies and the backend's own work
_CLEAN_SLEEP, _FASTER, _OF_THE_LINK = 0.015, 10.0, 0.97

Found = Mapping[str, Mapping[str, Times]]


@frozen(eq=False)
class _Setup:
    subject: Subject
    watch: Watch
    link: peers.Link
    others: Mapping[str, Peer]
    left_out: tuple[str, ...]


def measure(options: Options) -> Result:
    """Needs six times the bytes in host memory and eight times on the device, where all peers are there."""
    with attached(options) as subject:
        setup = _set_up(subject)
        first = _first(setup, options.rest)
        found = in_turns(_turns(setup), options.rounds, options.rest)
        return _result(options, setup, first, found, _collections(setup.subject))


def _set_up(subject: Subject) -> _Setup:
    nbytes, device, backend = subject.nbytes, device_here(), subject.actor.memory.name
    released = peers.bare_release(backend, subject.shapes, device)
    tensors = list(released.tensors.values())
    host = peers.host_buffer(max(nbytes, peers.host_bytes(tensors)))  # shared: its contents matter to nobody
    copies = peers.TensorCopies(tensors, host)
    saver, no_saver = peers.saver_peers(nbytes, device)
    naive, no_naive = peers.naive_peers(nbytes, device)
    others: dict[str, Peer] = {PER_TENSOR: peers.PerTensorCopies(released, copies)}
    link = peers.Link(nbytes, device, host)
    return _Setup(subject, Watch(subject.actor), link, {**others, **saver, **naive}, no_saver + no_naive)


def _turns(setup: _Setup) -> dict[str, Turn]:
    actor, watch = setup.subject.actor, setup.watch

    def clean() -> None:
        watch.start()
        setup.subject.land()
        watch.stop("landing")  # what a wake has left to be looked at: neither in its time nor in the next sleep's

    def dirty() -> None:
        clean()
        setup.subject.make_dirty()
        watch.start()

    cycle = {"sleep": actor.sleep, "wake": actor.wake_up}
    turns = {
        _CLEAN: Turn(cycle, clean, lambda step: watch.stop(f"clean {step}")),
        _DIRTY: Turn(cycle, dirty, lambda step: watch.stop(f"dirty {step}")),
        PLAIN: Turn({"sleep": setup.link.out, "wake": setup.link.into}),
        _BARE: setup.subject.bare(),
    }
    for name, peer in setup.others.items():
        turns[name] = Turn({"sleep": peer.sleep, "wake": peer.wake}, once=name in _SLOW)
    return turns


def _first(setup: _Setup, rest: float) -> dict[str, dict[str, float]]:
    """The first sleep and wake of each that is not slow anyway: buffers are made, pages locked. Seconds."""
    turns = {name: turn for name, turn in _turns(setup).items() if not turn.once and name != _CLEAN}
    turns[_DIRTY] = Turn(turns[_DIRTY].steps)  # the weights it was attached with have no other copy either
    found = in_turns(turns, 1, rest)
    return {name: {step: times.done for step, times in steps.items()} for name, steps in found.items()}


def _collections(subject: Subject) -> int:
    """How often a sleep with a current host copy runs Python's garbage collector, beside the interpreter's own runs."""
    runs: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        runs.append(phase)

    subject.land()
    gc.disable()
    gc.callbacks.append(told)
    try:
        subject.actor.sleep()
    finally:
        gc.callbacks.remove(told)
        gc.enable()
    subject.actor.wake_up()
    return runs.count("start")


def _result(options: Options, setup: _Setup, first: Mapping[str, Any], found: Found, collections: int) -> Result:
    accepted = _accepted(setup, found, collections) if device_here().type == "cuda" else ()
    return Result(
        bench="memory",
        machine=machine_facts(),
        settings={**options.to_plain(), "backend": setup.subject.actor.memory.name},
        groups=_groups(found),
        figures={
            "weights_bytes": setup.subject.nbytes,
            "first": first,
            "garbage_collections_in_a_clean_sleep": collections,
            "effects": {name: setup.watch.split(name) for name in setup.watch.seen},
            **_bandwidths(setup, found),
            "times": {name: {step: one.to_plain() for step, one in steps.items()} for name, steps in found.items()},
        },
        accepted=accepted,
        left_out=setup.left_out,
        notes=_notes(first, judged=bool(accepted)),
    )


def _notes(first: Mapping[str, Mapping[str, float]], judged: bool) -> tuple[str, ...]:
    names = [name for name in (_DIRTY, SAVER_RETAINED) if name in first]
    each = ", ".join(f"{name} {amount(first[name]['sleep'], 's')}" for name in names)
    told = f"the first sleep, buffers made: {each}"
    return (told,) if judged else (told, "without CUDA nothing is judged: there is no link")


def _bandwidths(setup: _Setup, found: Found) -> dict[str, float]:
    """Bytes per second of ours, from the effects that copy, and of the plain copy."""
    out, out_bytes = setup.watch.copies("dirty sleep", OUT)
    into, in_bytes = setup.watch.copies("dirty wake", IN)
    return {
        "copy_out_bytes_per_s": out_bytes / out,
        "copy_in_bytes_per_s": in_bytes / into,
        "plain_out_bytes_per_s": setup.link.nbytes / found[PLAIN]["sleep"].done,
        "plain_in_bytes_per_s": setup.link.nbytes / found[PLAIN]["wake"].done,
    }


def _groups(found: Found) -> tuple[Group, ...]:
    bare, plain = found[_BARE], found[PLAIN]
    return (
        Group("sleep, host copy current", "s", _bars(found, _CLEAN, "sleep"), bare["sleep"].done, "bare pause"),
        Group(
            "sleep, weights on the device alone",
            "s",
            _bars(found, _DIRTY, "sleep"),
            bare["sleep"].done + plain["sleep"].done,
            f"{PLAIN} + bare pause",
        ),
        Group(
            "wake, until the bytes are there",
            "s",
            (
                *_bars(found, _CLEAN, "wake"),
                bar("ours, until the call returns", "ours", found[_CLEAN]["wake"], "", True),
            ),
            bare["wake"].done + plain["wake"].done,
            f"{PLAIN} + bare resume",
        ),
    )


def _bars(found: Found, ours: str, step: str) -> tuple[Bar, ...]:
    left = {_CLEAN, _DIRTY, PLAIN, _BARE} - {ours}
    role: Role
    bars = []
    for name, steps in found.items():
        if name not in left:
            role = "ours" if name == ours else "peer"
            bars.append(
                bar("ours" if role == "ours" else name, role, steps[step], "one round" if name in _SLOW else "")
            )
    return by_length(bars)


def _accepted(setup: _Setup, found: Found, collections: int) -> tuple[Accepted, ...]:
    watch, speed = setup.watch, _bandwidths(setup, found)
    clean, dirty = found[_CLEAN], found[_DIRTY]
    out, into = watch.copies("dirty sleep", OUT)[0], watch.copies("dirty wake", IN)[0]
    lines = [
        Accepted("1: sleep with a current host copy", "<=", _CLEAN_SLEEP, clean["sleep"].done, "s"),
        Accepted("1: garbage collections on this path", "<=", 0, collections, "runs"),
    ]
    if SAVER_RETAINED in found:
        ratio = found[SAVER_RETAINED]["sleep"].done / clean["sleep"].done
        lines.append(Accepted(f"1: faster than the {SAVER_RETAINED}", ">=", _FASTER, ratio, "times"))
    for way, copied in (("out", "copy_out_bytes_per_s"), ("in", "copy_in_bytes_per_s")):
        share = speed[copied] / speed[f"plain_{way}_bytes_per_s"]
        lines.append(Accepted(f"2: copy effects {way}, share of the plain pinned copy", ">=", _OF_THE_LINK, share))
    for step, copies in (("sleep", out), ("wake", into)):
        most = copies + found[_BARE][step].done + _SLACK
        lines.append(
            Accepted(f"2: dirty {step}, whole, against its copies + bare + 5 ms", "<=", most, dirty[step].done, "s")
        )
    return tuple(lines)
