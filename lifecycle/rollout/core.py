"""The engine inside its process: a model, its weights, and what it may do now. Also usable without a process."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import psutil
import torch

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, PauseMode
from lifecycle.rollout.generation import GenerationOptions, Generator
from lifecycle.rollout.segments import SegmentCache
from lifecycle.rollout.state import EngineState, Outcome, Request
from lifecycle.rollout.weights import ModelWeights, manifest_from_plain


class EngineCore:
    """All of an engine but its process. Every method takes and gives plain data and raises EngineError.

    ``run`` is the loop of the one thread that generates. Every other method may be called from any thread at any
    time; those that touch the weights wait for each other, the others do not.
    """

    def __init__(self, name: str, model: Any, *, seed: int = 0) -> None:
        self.name = name
        self._state = EngineState(name)
        self._weights = ModelWeights(model)
        self._segments = SegmentCache()
        self._generator = Generator(model, seed=seed)
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._operation = threading.Lock()
        _trim()

    @property
    def weight_version(self) -> int | None:
        return self._state.version

    # Generation

    def admit(
        self, prompts: Sequence[Sequence[int]], options: Mapping[str, Any], done: Callable[[Outcome], None]
    ) -> None:
        """Accept a request; ``done`` gets its outcome from the thread in ``run``."""
        try:
            self._generator.check_prompts(prompts)
            parsed = GenerationOptions.parse(options)
        except (ValueError, TypeError) as error:
            raise EngineError(self.name, "generate", str(error)) from error
        self._state.admit([list(prompt) for prompt in prompts], parsed, done)

    def run(self) -> None:
        """Run requests, one at a time and in their order, until ``stop``."""
        while (request := self._state.take()) is not None:
            outcome = self._outcome(request)
            self._state.finish(request)
            request.done(outcome)

    def stop(self) -> None:
        self._state.stop()

    def pause_generation(self, mode: PauseMode) -> None:
        self._state.pause(mode)

    def continue_generation(self) -> None:
        self._state.resume_generation()

    def flush_cache(self) -> None:
        """Caches belong to requests and end with them, so all there is to do is to give freed memory back."""
        self._state.flush_cache()
        _trim()

    # Updates

    def begin_update(
        self, manifest: Mapping[str, Any], segments: Sequence[Mapping[str, Any]], fds: Sequence[int]
    ) -> None:
        """Check everything, then let go of the version, then copy. Refused means that no byte was touched.

        If the copying itself fails, the update is over as after ``abort_update``.
        """
        with self._operation:
            try:
                update = manifest_from_plain(manifest)
                self._state.check_update(update.version)
                moves = self._weights.plan(update, self._segments.open(segments, fds))
            except (ValueError, TypeError, KeyError) as error:
                raise EngineError(self.name, "begin_update", f"refused, nothing was written: {error}") from error
            self._state.open_update(update.version)
            try:
                self._weights.write(moves)
            except BaseException:
                self._state.abort_update()
                raise

    def check_weights(self, fingerprints: Mapping[str, str]) -> list[str]:
        with self._operation:
            self._state.check_weights()
            return list(self._weights.differing(fingerprints))

    def end_update(self, version: int) -> None:
        with self._operation:
            self._state.end_update(version)

    def abort_update(self) -> None:
        with self._operation:
            self._state.abort_update()

    # Memory

    def release(self, pools: Collection[str]) -> None:
        """On return, and as soon as ``status`` says so, the memory is free."""
        with self._operation:
            self._state.release(pools, self._give_back)

    def resume(self, pools: Collection[str]) -> None:
        with self._operation:
            self._state.resume(pools, self._take_back)

    def status(self) -> dict[str, Any]:
        """Plain data; never waits for a request, an update or a pause."""
        held = self._state.snapshot()
        sizes = {"weights": self._weights.nbytes, "kv_cache": 0}
        pools = {
            pool: {"state": held["pools"][pool], "nbytes": sizes[pool] if held["pools"][pool] == "resident" else 0}
            for pool in POOLS
        }
        return {
            **held,
            "name": self.name,
            "pid": os.getpid(),
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "pools": pools,
            "segments": list(self._segments.ids),
            "memory": process_memory(),
        }

    def _give_back(self, pool: str) -> None:
        if pool == "weights":
            self._weights.depopulate()
        _trim()

    def _take_back(self, pool: str) -> None:
        if pool == "weights":
            self._weights.populate()

    def _outcome(self, request: Request) -> Outcome:
        try:
            answers = self._answers(request)
        except Exception as error:
            return EngineError(self.name, "generate", f"{type(error).__name__}: {error}")
        return [{**answer, "weight_version": request.version} for answer in answers]

    def _answers(self, request: Request) -> list[dict[str, Any]]:
        if request.aborted:
            empty = {"tokens": [], "finish_reason": "abort"}
            return [{**empty, "logprobs": []} if request.options.logprobs else empty for _ in request.prompts]
        return self._generator.generate(request.prompts, request.options, lambda: self._state.at_token(request))


def process_memory() -> dict[str, int]:
    """Bytes of this process: ``rss``, ``shared`` (mapped files, shared memory) and ``anon``, the difference."""
    info = psutil.Process().memory_info()
    return {"rss": info.rss, "shared": info.shared, "anon": info.rss - info.shared}


def _trim() -> None:
    """Give freed heap memory back to the system; without it the process keeps it for later."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
