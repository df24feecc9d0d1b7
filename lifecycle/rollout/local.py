"""The rollout engine ``local``: a causal language model of transformers in a process of its own, on the CPU.

Weights come through shared memory: the process maps the sender's host copies read-only and copies straight from them
into its own parameters. Whatever happens to the process, this side only ever sees an answer or an EngineError.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import lifecycle
from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, PauseMode
from lifecycle.rollout.link import WorkerLink
from lifecycle.sync.base import Transport, UpdateManifest
from lifecycle.sync.shared_memory import SharedMemoryTransport

#: The program of the process. ``-P``: a file in the current directory must not pass for an installed package.
WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "lifecycle.rollout.worker")

#: Quiet, offline, and off the trainer's GPUs.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


class LocalEngine:
    """One engine in one process. Usable from several threads; in a forked child every call is refused.

    ``config`` is a ``PretrainedConfig`` or its dict. Only the architectures of transformers itself work: no code
    travels and none is loaded from files. ``dtype`` names a floating-point type of torch; the weights of an update must
    have it. ``threads`` limits torch's threads in the process. ``seed`` seeds sampling without a seed of its own.
    Times are in seconds.

    It starts with no version; the first update brings one. Its process ends with it, with ``close`` and, whatever
    happens, with this process. When it dies by itself, every call says so until ``restart``.
    """

    transports: tuple[str, ...] = ("shared_memory",)

    def __init__(
        self,
        config: Any,
        *,
        tokenizer: Any = None,
        start: bool = True,
        name: str = "local",
        dtype: str = "float32",
        threads: int | None = None,
        request_timeout: float = 600.0,
        startup_timeout: float = 120.0,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._start_arguments = {
            "name": name,
            "config": config if isinstance(config, Mapping) else config.to_dict(),
            # to_dict() leaves it out, and another kernel gives other numbers.
            "attention": getattr(config, "_attn_implementation", None),
            "dtype": dtype,
            "threads": threads,
            "seed": seed,
        }
        self._request_timeout, self._startup_timeout = request_timeout, startup_timeout
        self._link: WorkerLink | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._turning = threading.Lock()
        if start:
            self.start()

    # The process

    def start(self) -> None:
        """Start the process and wait until its model is built. Nothing to do when it runs; refused when it died."""
        with self._turning:
            if self._link is not None and self._link.alive:
                return
            if self._link is not None:
                self._link.require_usable("start")
            self._start()

    def restart(self) -> None:
        """End the process, if it is still there, and start a fresh one. It holds no version."""
        with self._turning:
            if self._link is not None:
                self._link.require_owner("restart")
            self._close()
            self._start()

    def close(self) -> None:
        """End the process. Requests under way fail. May be called again; ``start`` begins a new process."""
        with self._turning:
            self._close()

    @property
    def alive(self) -> bool:
        link = self._link
        return link is not None and link.alive

    @property
    def pid(self) -> int | None:
        """Process id of the engine, or None when it was not started or was closed."""
        return self._link.pid if self._link is not None else None

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Generation

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """Continue each prompt (token ids, no padding). Requests of several threads run one after another.

        Options: ``max_new_tokens`` (16), ``do_sample`` (False: greedy), ``temperature``, ``top_p``, ``top_k`` (0: all),
        ``seed``, ``eos_token_id`` (an id or several, None: never stop, ``"config"``: the config's), ``pad_token_id``,
        ``logprobs`` (False).

        One dict per prompt: ``tokens`` (the new ids; the end of sequence is the last of them), ``finish_reason``
        ("stop", "length", or "abort" when a pause or an update ended it with the tokens so far), ``weight_version``
        (the one version that made all of them), and if asked ``logprobs``: the natural logarithm of the probability of
        each token under the model's own distribution, before temperature, top-p and top-k.

        Refused while paused, released, without a version, or with an update open.
        """
        try:
            plain = [[int(token) for token in prompt] for prompt in prompts]
        except (TypeError, ValueError) as error:
            raise EngineError(self.name, "generate", f"prompts must be lists of token ids: {error}") from error
        answers: list[dict[str, Any]] = self._call("generate", prompts=plain, options=options)
        return answers

    def generate_text(self, prompts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """``generate`` for text: prompts are encoded, and every answer also has ``text``."""
        if self.tokenizer is None:
            raise EngineError(self.name, "generate_text", "it has no tokenizer: LocalEngine(config, tokenizer=...)")
        answers = self.generate([self.tokenizer(prompt)["input_ids"] for prompt in prompts], **options)
        for answer in answers:
            answer["text"] = self.tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        return answers

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Refuse new requests from now on, bring the accepted ones to rest, and return when they are.

        "abort" ends them with the tokens so far; "wait" lets them finish; "keep" freezes the running one between two
        tokens and holds back the others, all of which go on after ``continue_generation``, unless an update begins:
        it ends them as aborted, because what they have computed belongs to the old weights. The last mode asked rules.
        """
        self._call("pause_generation", mode=mode)

    def continue_generation(self) -> None:
        """Accept requests again and let kept ones go on. Refused while an update is open."""
        self._call("continue_generation")

    def flush_cache(self) -> None:
        """Nothing derived from weights outlives its request; this gives freed memory back. Refused while one runs."""
        self._call("flush_cache")

    # Weights

    @property
    def weight_version(self) -> int | None:
        """The version it generates with, asked from the process. None without one, or when there is no process."""
        link = self._link
        if link is None:
            return None
        try:
            version: int | None = link.call("weight_version", {}, self._request_timeout)
        except EngineError:
            if link.alive or os.getpid() != link.owner:
                raise
            return None
        return version

    def begin_update(self, manifest: UpdateManifest, transport: Transport) -> None:
        """Take all tensors of the update into its own memory; on return the sender's is no longer read.

        Every parameter and persistent buffer must come, with its own dtype and shape; tied names once or each;
        non-persistent buffers may. Refused, by names and with nothing written, when something does not fit; when the
        weights are released, an update is open or a request runs; and when it holds a newer version (the same may
        come again; after ``abort_update`` or a release of the weights it holds none, and takes any).
        """
        if not isinstance(transport, SharedMemoryTransport):
            raise EngineError(self.name, "begin_update", f"takes {self.transports[0]}, not {transport.name}")
        fds = [segment.fd for segment in transport.segments]
        try:
            for fd in fds:
                os.fstat(fd)
        except OSError as error:
            raise EngineError(self.name, "begin_update", f"a segment is not open any more: {error}") from error
        segments = [{"id": segment.id, "nbytes": segment.nbytes} for segment in transport.segments]
        self._call("begin_update", fds, manifest=manifest.to_plain(), segments=segments)

    def receive(self, bucket: Any) -> None:
        """Refused: it reads the sender's memory by itself."""
        raise EngineError(self.name, "receive", "it reads shared memory by itself; begin_update took everything")

    def check_weights(self, fingerprints: Mapping[str, str]) -> tuple[str, ...]:
        """Names whose bytes in the process differ from these fingerprints, or which its model lacks."""
        return tuple(self._call("check_weights", fingerprints=dict(fingerprints)))

    def end_update(self, version: int) -> None:
        """Hold the version of the open update; any other is refused, and the update stays open."""
        self._call("end_update", version=version)

    def abort_update(self) -> None:
        """End any update and every request: no version, paused. Never refused by a living process."""
        self._call("abort_update")

    # Memory

    def release(self, pools: Collection[str] = POOLS) -> None:
        """Give the memory of these pools back; on return it is free. Released weights are lost, with their version.

        Caches live only as long as their request, so releasing ``kv_cache`` keeps the engine from making new ones.
        Refused while a request is not finished or an update is open. What is released already is left alone.
        """
        self._call("release", pools=list(pools))

    def resume(self, pools: Collection[str] = POOLS) -> None:
        """Take the memory of these pools back, where it was released. Weights have no contents until an update."""
        self._call("resume", pools=list(pools))

    def status(self) -> dict[str, Any]:
        """Plain data, at once: ``state`` (of ``states/rollout.py``), ``moving`` (an event that waits, or None),
        ``weight_version``, ``paused`` (mode or None), ``update`` (version or None), ``pools``, ``requests``,
        ``segments`` (ids it has mapped), ``pid``, ``dtype``, ``threads``, and ``memory`` (bytes: ``rss``, ``shared``,
        ``anon``)."""
        status: dict[str, Any] = self._call("status")
        return status

    def _call(self, operation: str, fds: Sequence[int] = (), **arguments: Any) -> Any:
        link = self._link
        if link is None:
            raise EngineError(self.name, operation, "it is not running: start() first")
        return link.call(operation, arguments, self._request_timeout, fds)

    def _start(self) -> None:
        link = WorkerLink(self.name, WORKER_COMMAND, _environment(), self._request_timeout)
        try:
            link.call("start", self._start_arguments, self._startup_timeout)
        except BaseException:
            link.close()
            raise
        # At exit too: an orderly end of the process comes before the threads that watch it are gone.
        self._link, self._finalizer = link, weakref.finalize(self, link.close)

    def _close(self) -> None:
        link, finalizer = self._link, self._finalizer
        if link is not None and finalizer is not None and link.owner == os.getpid():
            self._link = self._finalizer = None
            finalizer.detach()
            link.close()


def _environment() -> dict[str, str]:
    """The process must find this very package, also when it is run from a source tree."""
    assert lifecycle.__file__ is not None
    source = str(Path(lifecycle.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join((source, inherited)) if inherited else source
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path}
