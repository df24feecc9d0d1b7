"""Measurements with a result of their own, in the shape that tables, pictures and acceptance lines are made from."""

from __future__ import annotations

from lifecycle.bench.fingerprint import FingerprintBench
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.overhead import Overhead
from lifecycle.bench.pinning import Parts, Pinning, Round
from lifecycle.bench.result import Accepted, Bar, Group, Result, by_length

_OF_A_SUM, _PINNING = 1.4, 4.0


def fingerprint_result(found: FingerprintBench) -> Result:
    """The fingerprint's time beside torch's sums, and beside a copy of the same bytes."""
    plain = found.to_plain()
    bars = (
        Bar("ours, on the device", "ours", [found.device_s]),
        Bar("ours, started and read", "ours", [found.whole_s]),
        Bar("int64 sum of each tensor", "peer", [found.sum_each_s]),
        Bar("torch's sums, two passes", "peer", [found.two_passes_s]),
        Bar("pinned copy of the bytes", "peer", [found.copy_out_s]),
    )
    group = Group("fingerprint of all weights", "s", bars, found.sum_flat_s, "int64 sum of one tensor")
    accepted: tuple[Accepted, ...] = ()
    if found.device != "cpu":
        accepted = (
            Accepted(
                "6: fingerprint, against an int64 sum of each tensor", "<=", _OF_A_SUM, found.over_sum_each, "times"
            ),
            Accepted(
                "6: fingerprint, against an int64 sum of one tensor", "<=", _OF_A_SUM, found.over_sum_flat, "times"
            ),
            Accepted("6: tensors with another value on the CPU", "<=", 0, len(found.differing)),
        )
    settings = {"gib": found.nbytes / 2**30, "rounds": found.rounds}
    left_out = () if found.without_kernel is None else (f"the kernel: {found.without_kernel}",)
    notes = () if accepted else ("without CUDA nothing is judged",)
    return Result("fingerprint", machine_facts(), settings, (group,), plain, accepted, left_out, notes)


def pinning_result(found: Pinning) -> Result:
    """Seconds until a cold page-locked buffer is there."""
    bars = by_length(
        (
            Bar("ours, private", "ours", [one.private.total for one in found.rounds]),
            Bar("ours, shared", "ours", [one.shared.total for one in found.rounds]),
            Bar("cudaMallocHost", "peer", [one.cuda_malloc_host for one in found.rounds]),
            Bar(
                "mapped and populated alone, private",
                "peer",
                [_populate(one) for one in found.rounds],
                "a part of ours",
            ),
        )
    )
    group = Group("a cold page-locked buffer", "s", bars)
    line = Accepted(
        "4: pinning a cold private buffer, faster than cudaMallocHost", ">=", _PINNING, found.ratio, "times"
    )
    settings = {"gib": found.nbytes / 2**30, "rounds": len(found.rounds)}
    return Result("pinning", machine_facts(), settings, (group,), found.to_plain(), (line,), (), found.notes)


def _populate(one: Round) -> float:
    parts: Parts = one.private
    return parts.map_and_populate


def overhead_result(found: Overhead) -> Result:
    """A round trip's medians; p10 and p90 are in the figures."""
    bars = (
        Bar("lifecycle", "ours", [found.ours_us.median / 1e6]),
        Bar("bare transitions", "peer", [found.bare_us.median / 1e6]),
    )
    group = Group("switch there and back between two tags of one version", "s", bars)
    note = f"medians of {found.rounds} interleaved rounds, {found.bytes_moved} bytes moved"
    return Result("overhead", machine_facts(), {"rounds": found.rounds}, (group,), found.to_plain(), notes=(note,))
