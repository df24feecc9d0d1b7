"""The ledger of the memory saver: the only place that calls it.

Theory of operation. torch-memory-saver unmaps and remaps the memory of a *pool* (its word is tag) at the same
addresses. Its C++ has no query, and answers what it did not expect with ``exit(1)``: pausing what is paused, resuming
what is not, a pool with some of both, and, for allocations too in hook mode ``torch``, too little memory. Nobody can
catch that. So one ledger per process knows each pool's state, everything of ours goes through it, and what would end
the process is refused before. [Note: foreign calls] Others in the process use the same saver object. The ledger puts
itself in front of that object's methods: calls for pools of others pass, calls that touch ours are refused. What is
called below that, in the C library itself, it can not hear; but before it acts it asks the driver whether the pool's
memory is mapped, and refuses, and learns, where the answer is not what it thought.

Free memory is looked at just before a resume. What another process takes between the look and the resume is outside
what can be promised.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from typing import Any

import torch
from attrs import frozen

from lifecycle.errors import TransitionRefused
from lifecycle.memory import driver, hook_modes
from lifecycle.memory.beside import beside
from lifecycle.memory.hook_modes import SaverUnusable
from lifecycle.memory.room import require_room

GRANULE = 2 << 20  # bytes; the saver maps whole multiples of it
_SAMPLES = 4  # segments that are asked about before a call: the saver pauses and resumes all of a pool


class PoolState(StrEnum):
    """What the ledger knows of a pool. UNKNOWN: a call of the saver did not return, or the driver disagrees."""

    ACTIVE = "active"
    PAUSED = "paused"
    UNKNOWN = "unknown"


_STATES = {True: PoolState.ACTIVE, False: PoolState.PAUSED}  # by whether its memory is mapped


@frozen
class Span:
    """``nbytes`` bytes of device memory at ``address``, on the device of this index."""

    device: int
    address: int
    nbytes: int


class Ledger:
    """The states of the saver's pools in this process. Thread-safe; made once, by ``ledger``."""

    def __init__(self, saver: Any, mode: str) -> None:
        self.mode = mode
        self._saver = saver
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._begun: Future[None] | None = None  # that nobody has waited for
        self._states: dict[str, PoolState] = {}
        self._ours: list[str] = []  # pools that others must not touch
        self._open: dict[int, str] = {}  # thread -> the pool it allocates in
        self._kept: set[int] = set()  # memory pools that are never destroyed
        self._seen: dict[str, tuple[tuple[int, ...], tuple[Span, ...]]] = {}  # segments, and when they were looked up
        self._pause, self._resume = saver.pause, saver.resume
        self._region, self._cuda_graph = saver.region, saver.cuda_graph
        saver.pause, saver.resume = self._heard_pause, self._heard_resume
        saver.region, saver.cuda_graph = self._heard_region, self._heard_cuda_graph

    def pools(self) -> tuple[str, ...]:
        """Every pool of the saver in this process, those of others too."""
        return tuple(dict.fromkeys((*self._states, *(key[0] for key in self._mem_pools()))))

    def state(self, pool: str, samples: int | None = None) -> PoolState | None:
        """What the driver says of the pool's memory, or if it says nothing, what was recorded. None: no such pool.

        It is asked about every segment, which takes microseconds each, or about so many from all over the pool.
        """
        return self.states([pool], samples)[pool]

    def states(self, pools: Sequence[str], samples: int | None = None) -> dict[str, PoolState | None]:
        """``state`` of several pools, for which torch is asked once what it took and gave back."""
        with self._alone():
            spans = self._segments([pool for pool in self.pools() if pool in pools])
            return {pool: self._state(pool, spans[pool], samples) if pool in spans else None for pool in pools}

    def recorded(self, pool: str) -> PoolState | None:
        """As ``state``, without asking the driver for pools of ours whose record is sure."""
        with self._alone():
            known = self._states.get(pool) if pool in self._ours else None
            return known if known in (PoolState.ACTIVE, PoolState.PAUSED) else self.state(pool)

    def claim(self, pool: str) -> PoolState | None:
        """Count a pool as ours from here on, whoever made it or will. Returns its state."""
        with self._alone():
            if pool not in self._ours:
                self._ours.append(pool)
            return self.state(pool)

    def segments(self, pool: str) -> tuple[Span, ...]:
        """The memory that a pause of the pool releases."""
        with self._alone():
            return self._segments([pool])[pool]

    def _segments(self, pools: Sequence[str]) -> dict[str, tuple[Span, ...]]:
        """Looked up anew where torch has taken memory since, or given some back, or does not tell."""
        age = driver.allocations() if pools else None
        for pool in pools:
            found = self._seen.get(pool)
            if age is None or found is None or found[0] != age:
                parts = self._snapshot(pool)
                spans = tuple(Span(part["device"], part["address"], part["total_size"]) for part in parts)
                self._seen[pool] = age or (), spans
        return {pool: self._seen[pool][1] for pool in pools}

    def live_blocks(self, pool: str) -> tuple[Span, ...]:
        """What is allocated in the pool's segments now."""
        return tuple(
            Span(found["device"], block["address"], block["size"])
            for found in self._snapshot(pool)
            for block in found["blocks"]
            if block["state"] == "active_allocated"
        )

    @contextmanager
    def allocating(self, pool: str, nbytes: int = 0, reserve: int = 0) -> Iterator[None]:
        """Inside, this thread's CUDA allocations on the current device are made in the pool. The saver backs none up.

        ``nbytes`` is what will be allocated: NoRoom is raised where it does not fit. ``reserve``: a segment of so many
        bytes is taken first, that allocations of 1 MiB or more on the current stream are cut from; torch takes one for
        every tensor of 10 MiB or more, and a pause takes tens of microseconds for each. Raises TransitionRefused inside
        another such block, and while the pool is paused: its next resume would end the process.
        """
        thread = threading.get_ident()
        with self._alone():
            self._check(event := f"allocation in pool {pool!r}", pool)
            if thread in self._open:
                where = f"a block for pool {self._open[thread]!r}"
                raise TransitionRefused(event, where, (), "regions do not nest", "Leave that one first.")
            state = self.claim(pool)
            if state not in (None, PoolState.ACTIVE):
                self._refuse(event, state, "new memory in it could never be resumed with the rest")
            if needed := max(nbytes, reserve):
                require_room(event, str(state or "new"), {torch.cuda.current_device(): needed})
            self._open[thread] = pool
        try:
            with self._region(tag=pool):
                self._states.setdefault(pool, PoolState.ACTIVE)
                self._keep(pool)
                if reserve:
                    _take(reserve)
                yield
        finally:
            del self._open[thread]

    def pause(self, pool: str) -> int:
        """Give back the pool's memory, content lost; what is in flight must have ended. Returns the bytes.

        Raises TransitionRefused, with nothing done, unless the pool is there, active, and nobody allocates in it.
        """
        with self._alone():
            self._check(event := f"pause of pool {pool!r}", pool)
            spans = self._expect(event, pool, PoolState.ACTIVE)
            if pool in self._open.values():
                self._refuse(event, PoolState.ACTIVE, "a region block for it is open", "Leave the block first.")
            self._run(self._pause, pool, PoolState.PAUSED)
            return sum(span.nbytes for span in spans)

    def resume(self, pool: str) -> int:
        """Map the pool's memory again, content undefined. Returns the bytes.

        Raises TransitionRefused unless the pool is there and paused, NoRoom where its memory does not fit; the pool is
        still paused then.
        """
        with self._alone():
            needed = self._resumable(pool)
            self._run(self._resume, pool, PoolState.ACTIVE)
            return sum(needed.values())

    def begin_resume(self, pool: str) -> Future[None]:
        """As ``resume``, but the memory may still be being mapped on return: whatever else is asked waits for that.

        The caller goes on meanwhile, since the saver runs without Python's lock. Raises as ``resume``.
        """
        with self._alone():
            self._resumable(pool)
            self._begun = beside(lambda: self._run(self._resume, pool, PoolState.ACTIVE))
            return self._begun

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time, and none while the saver still maps."""
        with self._lock:
            if self._begun is not None and os.getpid() == self._pid:  # a forked process has no such thread
                self._begun.exception()
                self._begun = None
            yield

    def _resumable(self, pool: str) -> dict[int, int]:
        """The bytes that a resume needs, by device. Raises as ``resume``."""
        self._check(event := f"resume of pool {pool!r}", pool)
        needed: dict[int, int] = {}
        for span in self._expect(event, pool, PoolState.PAUSED):
            needed[span.device] = needed.get(span.device, 0) + -(-span.nbytes // GRANULE) * GRANULE
        require_room(event, PoolState.PAUSED, needed)
        return needed

    def _run(self, call: Any, pool: str, then: PoolState) -> None:
        self._states[pool] = PoolState.UNKNOWN  # until it has returned
        call(pool)
        self._states[pool] = then

    def _state(self, pool: str, spans: Sequence[Span], samples: int | None) -> PoolState:
        said = driver.mapped(span.address for span in spans[:: 1 if samples is None else max(1, len(spans) // samples)])
        if said:
            self._states[pool] = PoolState.UNKNOWN if len(said) == 2 else _STATES[True in said]
        return self._states.setdefault(pool, PoolState.ACTIVE)

    def _expect(self, event: str, pool: str, wanted: PoolState) -> tuple[Span, ...]:
        """The pool's segments, where it is ours and in this state."""
        if pool not in self._ours or pool not in self.pools():
            reason, advice = "nobody has allocated in it here", "Pools are made by lifecycle.region and by attaching."
            raise TransitionRefused(event, "no such pool", self._ours, reason, advice)
        thought, spans = self._states.get(pool), self.segments(pool)
        state = self._state(pool, spans, _SAMPLES)
        if state is not wanted:
            reason = f"only a pool that is {wanted} can be; the saver would end the process"
            if thought is wanted:
                reason = "the driver says so: the saver's library was called without this ledger"
            self._refuse(event, state, reason)
        return spans

    def _check(self, event: str, pool: str) -> None:
        if not pool:
            reason = "no name means all pools to it, those of others too, and one in the wrong state ends the process"
            raise TransitionRefused(event, "the memory saver", self._ours, reason, "Name one.")
        if os.getpid() != self._pid:
            raise TransitionRefused(
                event, "a forked process", (), "CUDA does not survive a fork", "Start processes with 'spawn'."
            )
        impl = self._saver._impl
        mode = None if impl is None else _private(impl, "_hook_mode")
        if mode != self.mode:
            raise _conflict(f"hook mode {self.mode!r}", str(mode), self.mode)

    def _refuse(self, event: str, state: PoolState, reason: str, advice: str = "") -> None:
        allowed = {PoolState.ACTIVE: ("pause", "allocation"), PoolState.PAUSED: ("resume",), PoolState.UNKNOWN: ()}
        raise TransitionRefused(event, state, allowed[state], reason, advice)

    def _mem_pools(self) -> dict[tuple[Any, ...], Any]:
        return dict(_private(_private(self._saver, "_impl"), "_mem_pools"))

    def _snapshot(self, pool: str) -> list[dict[str, Any]]:
        found = [part for key, mem_pool in self._mem_pools().items() if key[0] == pool for part in mem_pool.snapshot()]
        if any(part.get("is_expandable") for part in found):
            raise SaverUnusable(f"pool {pool!r} has expandable segments: set expandable_segments:False and start again")
        return found

    def _keep(self, pool: str) -> None:
        """Let the pool's torch objects outlive the interpreter.

        Destroyed at its end they would free their segments outside a region, which the saver answers with exit(1).
        """
        for key, mem_pool in self._mem_pools().items():
            if key[0] == pool and id(mem_pool) not in self._kept:
                self._kept.add(id(mem_pool))
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(mem_pool))

    # in front of the saver's own methods, see [Note: foreign calls]

    def _heard_pause(self, tag: str | None = None) -> None:
        self._refuse_foreign("torch_memory_saver.pause", tag)
        self._pause(tag)

    def _heard_resume(self, tag: str | None = None) -> None:
        self._refuse_foreign("torch_memory_saver.resume", tag)
        self._resume(tag)

    def _heard_region(self, tag: str = "default", *args: Any, **settings: Any) -> Any:
        self._refuse_foreign("torch_memory_saver.region", tag)
        return self._region(tag, *args, **settings)

    def _heard_cuda_graph(self, *args: Any, tag: str = "default", **settings: Any) -> Any:
        self._refuse_foreign("torch_memory_saver.cuda_graph", tag)
        return self._cuda_graph(*args, tag=tag, **settings)

    def _refuse_foreign(self, method: str, tag: str | None) -> None:
        with self._alone():
            pools = self.pools()
            touched = [pool for pool in pools if pool in self._ours and (not tag or tag == pool)]
            others = [pool for pool in pools if pool not in self._ours]
        if touched:
            raise TransitionRefused(
                f"{method}({tag!r})",
                f"a process where lifecycle has the pools {', '.join(self._ours)}",
                [f"{method}({other!r})" for other in others],
                f"{', '.join(touched)} would change without the actor's knowledge, and a later call end the process",
                "Call it with a tag of your own; the actor's memory goes by sleep() and wake_up().",
            )


class _FixedMode(dict[str, str]):
    """Stands where the saver keeps its settings: the hook mode can only be set to what it is."""

    def __setitem__(self, key: str, value: str) -> None:
        if key == "hook_mode" and value != self[key]:
            raise _conflict(f"hook_mode = {value!r}", self[key], self[key])
        super().__setitem__(key, value)


_made: list[Ledger] = []
_making = threading.Lock()


def ledger() -> Ledger:
    """The ledger of this process. The first call decides and fixes the saver's hook mode, and initialises it.

    Raises MissingExtra without the saver, SaverUnusable where it can not work, TransitionRefused where another import
    has set another hook mode.
    """
    with _making:
        if not _made:
            saver = hook_modes.saver_module().torch_memory_saver
            hook_modes.refuse_allocator()
            mode = hook_modes.hook_mode()
            _initialise(saver, mode)
            _made.append(Ledger(saver, mode))
        return _made[0]


def saver_version() -> str:
    return version("torch-memory-saver")


def _initialise(saver: Any, mode: str) -> None:
    if _private(saver, "_impl") is None:
        settings = _private(saver, "_impl_ctor_kwargs")
        before = settings.get("hook_mode")
        if before not in (None, mode):
            raise _conflict(f"hook mode {mode!r}", before, mode)
        saver.hook_mode = mode
        try:
            _private(saver, "_ensure_initialized")()
        except (AssertionError, OSError, RuntimeError, AttributeError) as error:
            if before is None:
                del settings["hook_mode"]  # whoever needs it otherwise is free to say so
            raise SaverUnusable(
                f"the memory saver does not start in hook mode {mode!r} ({type(error).__name__}: {error}). It needs a "
                "CUDA driver and a torch built for CUDA 12 or 13; memory='storage' works without it."
            ) from error
    initialised = _private(saver._impl, "_hook_mode")
    if initialised != mode:
        raise _conflict(f"hook mode {mode!r}", initialised, mode)
    _private(saver._impl, "_mem_pools")
    saver._impl_ctor_kwargs = _FixedMode(hook_mode=mode)


def _conflict(event: str, found: str, wanted: str) -> TransitionRefused:
    return TransitionRefused(
        event,
        f"hook mode {found!r} of the memory saver",
        (f"torch_memory_saver.hook_mode = {wanted!r}",),
        "one process has one hook mode, and something else here (SGLang sets it on import) wants another",
        "For 'preload' start the process with lifecycle.memory.environment(); for 'torch' start it without, and have "
        "the other import set 'torch' too.",
    )


def _private(owner: Any, name: str) -> Any:
    """What the saver gives no public access to; a version that has moved it is refused."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise SaverUnusable(
            f"torch-memory-saver {saver_version()} has no {name} where it was: this library works with 0.0.10. Install "
            "that version, or choose memory='storage'."
        ) from None


def _take(nbytes: int) -> None:
    """Allocate it, and let go: torch keeps the segment, and cuts what comes next from it."""
    torch.empty(nbytes, dtype=torch.uint8, device="cuda")
