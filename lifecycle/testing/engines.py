"""A rollout engine without a model and without a process, for tests of whoever drives engines."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, PauseMode
from lifecycle.rollout.state import EngineState
from lifecycle.sync.base import Transport, UpdateManifest


class FakeEngine:
    """Refuses what a real engine refuses (the same ``EngineState`` decides), and holds names instead of weights.

    It reads no bytes, unless the transport offers ``tensors()``, a mapping of names to tensors: of these it keeps
    copies, in ``weights``. Otherwise it takes the manifest's fingerprints for its own.

    ``names``: what its model has; None takes whatever comes. ``transports``: what it takes; with ``pushed`` the bytes
    come by ``receive``, as mappings of names to tensors. ``fail_on``: methods that raise EngineError, having done
    nothing. ``die_on``: methods in which it dies. ``corrupted``: names that ``check_weights`` reports.
    ``token_seconds``: how long a token takes. All but the state may be changed at any time; ``calls`` has every call.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        names: Collection[str] | None = None,
        transports: Sequence[str] = ("shared_memory",),
        pushed: bool = False,
        token_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self.names = frozenset(names) if names is not None else None
        self.transports = tuple(transports)
        self.pushed = pushed
        self.token_seconds = token_seconds
        self.fail_on: set[str] = set()
        self.die_on: set[str] = set()
        self.corrupted: set[str] = set()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.alive = True
        self.weights: dict[str, Any] = {}
        self._fingerprints: dict[str, str] = {}
        self._arrived: set[str] = set()
        self._state = EngineState(name)

    def restart(self) -> None:
        """A fresh engine with no version, whatever became of the old one."""
        self.calls.append(("restart", ()))
        self.alive = True
        self.weights, self._fingerprints, self._arrived = {}, {}, set()
        self._state = EngineState(self.name)

    def close(self) -> None:
        self.calls.append(("close", ()))
        self.alive = False

    @property
    def weight_version(self) -> int | None:
        return self._state.version if self.alive else None

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        self._enter("pause_generation", mode)
        self._state.pause(mode)

    def continue_generation(self) -> None:
        self._enter("continue_generation")
        self._state.resume_generation()

    def flush_cache(self) -> None:
        self._enter("flush_cache")
        self._state.flush_cache()

    def begin_update(self, manifest: UpdateManifest, transport: Transport) -> None:
        self._enter("begin_update", manifest, transport)
        if transport.name not in self.transports:
            raise self._refusal("begin_update", f"takes {', '.join(self.transports)}, not {transport.name}")
        sent = [tensor.name for tensor in manifest.tensors]
        unknown = [name for name in sent if self.names is not None and name not in self.names]
        if unknown:
            raise self._refusal("begin_update", f"unknown names: {', '.join(unknown)}")
        self._state.open_update(manifest.version)
        self._fingerprints = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
        offered = transport.tensors() if hasattr(transport, "tensors") else {}
        self.weights = {name: tensor.detach().clone() for name, tensor in offered.items()}
        self._arrived = set() if self.pushed else set(self._fingerprints)

    def receive(self, bucket: Any) -> None:
        self._enter("receive", bucket)
        self._state.receive(reads_itself=not self.pushed)
        self.weights.update(bucket)
        self._arrived |= set(bucket)

    def check_weights(self, fingerprints: Mapping[str, str]) -> tuple[str, ...]:
        self._enter("check_weights", fingerprints)
        self._state.check_weights()
        held = {**self._fingerprints, **self._measured()}
        return tuple(
            name for name, expected in fingerprints.items() if name in self.corrupted or held.get(name) != expected
        )

    def end_update(self, version: int) -> None:
        self._enter("end_update", version)
        expected = self.names if self.names is not None else self._fingerprints.keys()
        self._state.end_update(version, missing=sorted(expected - self._arrived))

    def abort_update(self) -> None:
        self._enter("abort_update")
        self._state.abort_update()

    def release(self, pools: Collection[str] = POOLS) -> None:
        self._enter("release", tuple(pools))
        if "weights" in self._state.release(pools):
            self.weights, self._fingerprints = {}, {}

    def resume(self, pools: Collection[str] = POOLS) -> None:
        self._enter("resume", tuple(pools))
        self._state.resume(pools)

    def status(self) -> dict[str, Any]:
        self._enter("status")
        held = self._state.snapshot()
        pools = {pool: {"state": state, "nbytes": 0} for pool, state in held["pools"].items()}
        return {**held, "name": self.name, "pools": pools}

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """Answers the version's number as every token."""
        self._enter("generate", prompts, options)
        wanted = options.get("max_new_tokens", 16)
        request = self._state.admit([list(prompt) for prompt in prompts], options)
        if self._state.take(request) is None:
            raise self._refusal("generate", "the engine is stopping")
        made = 0
        while made < wanted and not request.aborted:
            time.sleep(self.token_seconds)
            made += 1
            if self._state.at_token(request):
                break
        self._state.finish(request)
        reason = "length" if made == wanted else "abort"
        answer = {"tokens": [request.version] * made, "finish_reason": reason, "weight_version": request.version}
        return [dict(answer) for _ in prompts]

    def _measured(self) -> dict[str, str]:
        if not self.weights:
            return {}
        from lifecycle.fingerprint import fingerprint

        return {name: fingerprint(tensor) for name, tensor in self.weights.items()}

    def _enter(self, operation: str, *arguments: Any) -> None:
        self.calls.append((operation, arguments))
        if operation in self.die_on:
            self.alive = False
        if not self.alive:
            raise self._refusal(operation, "it died; restart() starts a fresh one")
        if operation in self.fail_on:
            raise self._refusal(operation, "asked to fail")

    def _refusal(self, operation: str, reason: str) -> EngineError:
        return EngineError(self.name, operation, reason)
