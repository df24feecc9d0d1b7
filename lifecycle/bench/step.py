"""The traffic of a whole RL step, device to host and back, against the least that must move (``bench.formula``).

bf16 weights, Adam with fp32 masters, 'ref' and 'old_actor': wake to the reference's log-probabilities, the old actor's,
train, sync, sleep. On CUDA the bytes are the profiler's; on the CPU there is no second counter than our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen

import lifecycle
from lifecycle.bench import formula
from lifecycle.bench.formula import Moved, Step
from lifecycle.bench.machine import machine_facts
from lifecycle.bench.masters import AdamWithMasters, state_bytes
from lifecycle.bench.memcpy import SMALL, Copied, copied_during
from lifecycle.bench.model import Decoder, decoder, tokens_for, weights_bytes
from lifecycle.bench.result import Accepted, Bar, Group, Result
from lifecycle.bench.step_peers import step_peers
from lifecycle.bench.subject import Options, device_here
from lifecycle.config import LifecycleConfig
from lifecycle.controller import ActorLifecycle
from lifecycle.rollout.base import RolloutEngine
from lifecycle.testing.engines import FakeEngine

_TOLERANCE = 0.001  # of the bytes: layouts are padded, and small copies are counted apart
_TOKENS = 64


@frozen
class Case:
    """How the tags move. ``shows``: the contents shown in a step, by names; ``together``: all tags at one version."""

    name: str
    rotate: tuple[tuple[str, str], ...]
    shows: tuple[str, ...]
    together: bool = False


#: The old actor is one version behind, as where rollouts run beside the training; or it is what is trained from, as
#: where they do not; or the reference is as well, as in a run's first step.
CASES = (
    Case(
        "old_actor one step behind",
        (("old_actor", "rollout_actor"), ("rollout_actor", "actor")),
        ("ref", "old_actor", "actor"),
    ),
    Case(
        "old_actor is the actor",
        (("old_actor", "actor"), ("rollout_actor", "actor")),
        ("ref", "actor", "actor"),
    ),
    Case("ref and old_actor are the actor", (), ("actor", "actor", "actor"), together=True),
)


@frozen(eq=False)
class _Trainer:
    """What a step needs. The engine stands for one that takes weights: what it copies for itself is not counted."""

    model: Decoder
    optimizer: AdamWithMasters
    actor: ActorLifecycle
    engine: RolloutEngine = field(factory=lambda: FakeEngine(transports=("shared_memory", "in_process")))

    def step(self, case: Case) -> None:
        """From asleep to asleep, in the order that moves least: nothing is shown twice."""
        tokens = tokens_for(self.model, _TOKENS)
        self.actor.wake_up("ref")
        self._log_probs(tokens)
        self.actor.switch("old_actor")
        self._log_probs(tokens)
        self.actor.switch("actor")
        with self.actor.training():
            self.optimizer.zero_grad()
            self.model(tokens).float().log_softmax(-1)[:, 0].mean().neg().backward()
            self.optimizer.step()
        self.actor.sync(self.engine, rotate=case.rotate)
        self.actor.sleep()

    def _log_probs(self, tokens: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(tokens).float().log_softmax(-1)

    def prepare(self, case: Case) -> None:
        """Bring the tags to where every later step of the case finds them, asleep; buffers are made here."""
        for _ in range(2):
            self.step(case)
        self.gather(case)

    def gather(self, case: Case) -> None:
        if case.together:
            self.actor.tag("ref", "actor")
            self.actor.tag("old_actor", "actor")


def measure(options: Options, steps: int = 2) -> Result:
    """``steps`` of each case. Needs seven times the weights on the device, and up to twenty times in host memory."""
    with _attached(options) as trainer:
        sizes = weights_bytes(trainer.model), state_bytes(trainer.optimizer)
        trainer.actor.sleep()
        counted = {case.name: _count(trainer, case, steps) for case in CASES}
        backend = trainer.actor.memory.name
    peers, left_out = step_peers(sizes[0], device_here(), len(CASES[0].shows), backend)
    peers_counted = {name: (peer.least, copied_during(peer.step)) for name, peer in peers.items()}
    settings = {**options.to_plain(), "backend": backend, "steps": steps, "small_copies_below_bytes": SMALL}
    return _result(settings, sizes, counted, peers_counted, left_out)


@contextmanager
def _attached(options: Options) -> Iterator[_Trainer]:
    with lifecycle.region("weights", memory=options.memory):
        model = decoder(options.nbytes, device_here())
    model.eval()
    with lifecycle.region("optimizer", memory=options.memory):
        optimizer = AdamWithMasters(model.parameters())
    tags = ("ref", "old_actor", "rollout_actor")
    config = LifecycleConfig(verify=options.verify)  # type: ignore[arg-type]
    with ActorLifecycle(model, optimizer, tags=tags, memory=options.memory, host=options.host, config=config) as actor:
        yield _Trainer(model, optimizer, actor)


def _count(trainer: _Trainer, case: Case, steps: int) -> list[Copied]:
    trainer.prepare(case)
    found = []
    for _ in range(steps):
        found.append(_counted(trainer.actor, lambda: trainer.step(case)))
        trainer.gather(case)
    return found


def _counted(actor: ActorLifecycle, step: Callable[[], None]) -> Copied:
    if device_here().type == "cuda":
        return copied_during(step)
    before = actor.traffic.device_to_host, actor.traffic.host_to_device
    step()
    return Copied(actor.traffic.device_to_host - before[0], actor.traffic.host_to_device - before[1])


def _result(
    settings: Mapping[str, Any],
    sizes: tuple[int, int],
    counted: Mapping[str, list[Copied]],
    peers: Mapping[str, tuple[Moved, Copied]],
    left_out: tuple[str, ...],
) -> Result:
    needed = {case.name: Step(*sizes, shows=case.shows) for case in CASES}
    figures = {
        "weights_bytes": sizes[0],
        "optimizer_bytes": sizes[1],
        "counted_by": "torch.profiler" if device_here().type == "cuda" else "our own traffic counter",
        "steps": {name: [one.to_plain() for one in copied] for name, copied in counted.items()},
        "minimum": {name: formula.minimum(step).to_plain() for name, step in needed.items()},
        "policies": {
            name: {policy: moves(step).to_plain() for policy, moves in formula.POLICIES.items()}
            for name, step in needed.items()
        },
        "peers": {
            name: {"formula": least.to_plain(), "counted": copied.to_plain()} for name, (least, copied) in peers.items()
        },
    }
    groups = tuple(_group(case.name, needed[case.name], counted[case.name], peers) for case in CASES)
    accepted = _accepted(needed, counted) if device_here().type == "cuda" else ()
    notes = [f"copies below {SMALL} bytes (fingerprints' results, kernels' tables) are counted apart"]
    if not accepted:
        notes = ["without CUDA the bytes are by our own counter, and nothing is judged"]
    return Result("step", machine_facts(), settings, groups, figures, accepted, left_out, tuple(notes))


def _group(case: str, step: Step, copied: list[Copied], peers: Mapping[str, tuple[Moved, Copied]]) -> Group:
    bars = [Bar("ours", "ours", tuple(one.total for one in copied))]
    for policy, moves in formula.POLICIES.items():
        if policy in peers:
            bars.append(Bar(policy, "peer", (peers[policy][1].total,)))
        elif policy != formula.OURS:
            bars.append(Bar(policy, "peer", (moves(step).total,), "by formula"))
    return Group(f"bytes per step, {case}", "B", bars, formula.minimum(step).total, "the least that must move")


def _accepted(needed: Mapping[str, Step], counted: Mapping[str, list[Copied]]) -> tuple[Accepted, ...]:
    lines = []
    for name, step in needed.items():
        least = formula.minimum(step)
        off = [abs(one.out / least.out - 1) + abs(one.into / least.into - 1) for one in counted[name]]
        lines.append(Accepted(f"7: bytes per step off the minimum, {name}", "<=", _TOLERANCE, max(off), "of it"))
    return tuple(lines)
