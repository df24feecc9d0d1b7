"""One sync's dealings with its engines: who was paused, who saw a byte, and by what way each takes its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from lifecycle.errors import EngineError, VerificationFailed
from lifecycle.rollout.base import PauseMode, RolloutEngine
from lifecycle.sync.base import SentTensor, Transport, UpdateManifest
from lifecycle.sync.in_process import InProcessTransport
from lifecycle.sync.shared_memory import Segment, SharedMemoryTransport
from lifecycle.versions import Facts, Lease
from states.resources import Copy

if TYPE_CHECKING:
    from torch import Tensor

    from lifecycle.actions import Action
    from lifecycle.hoststore.base import HostBuffer
    from lifecycle.manifest import PartLayout
    from states.resources import Slot

#: Transports by name, and whether they read host copies alone.
NEEDS_HOST_COPY = {"shared_memory": True, "in_process": False}


class Source(Protocol):
    """Where a session reads from: the controller's world."""

    @property
    def buffers(self) -> Mapping[int, HostBuffer]: ...
    @property
    def backend(self) -> _Layouts: ...
    @property
    def weight_names(self) -> frozenset[str]: ...
    def read(self, facts: Facts, lease: Lease) -> dict[str, Tensor]: ...


class _Layouts(Protocol):
    def layout(self, slot: Slot) -> PartLayout: ...


def choose_transport(engine: RolloutEngine, host_is_shared: bool) -> str:
    """The engine's best transport that works from here. Raises EngineError when there is none."""
    for name in engine.transports:
        if name == "in_process" or (name == "shared_memory" and host_is_shared):
            return name
    advice = "" if host_is_shared else "; ActorLifecycle(host='shared') lets engines of other processes read its copies"
    raise EngineError(engine.name, "connect", f"takes weights by {', '.join(engine.transports)} only{advice}")


class SyncSession:
    """Made for one sync, used by the thread that runs it.

    ``unsure``: engines of which nobody knows what they hold. An update that was cut off, by us or by whoever drove them
    before, may be open there: it is aborted first.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        host_is_shared: bool,
        mode: PauseMode,
        unsure: Collection[str] = (),
    ) -> None:
        self.engines = dict(engines)
        self.mode = mode
        self.unsure = frozenset(unsure)
        self.touched: set[str] = set()
        self.paused: set[str] = set()
        self.updating: set[str] = set()
        self.outcomes: dict[str, str] = dict.fromkeys(engines, "untouched")
        self.sent_bytes: dict[str, int] = dict.fromkeys(engines, 0)
        self.transports = {name: choose_transport(engine, host_is_shared) for name, engine in engines.items()}
        self._perform: dict[str, Callable[[RolloutEngine, Facts, Source], Any]] = {
            "engine_pause": self._pause,
            "engine_flush": lambda engine, facts, source: engine.flush_cache(),
            "engine_send": self._send,
            "engine_check": self._check,
            "engine_end": self._end,
            "engine_continue": self._continue,
            "engine_abort": self._abort,
            "engine_continue_untouched": self._continue_untouched,
        }

    @property
    def update_open(self) -> bool:
        return bool(self.updating)

    @property
    def needs_host_copy(self) -> bool:
        return any(NEEDS_HOST_COPY[name] for name in self.transports.values())

    def perform(self, action: Action, facts: Facts, source: Source) -> Any:
        if action.engine is None:
            return None  # connect: transports were chosen when the session was made
        engine = self.engines[action.engine]
        try:
            return self._perform[action.do](engine, facts, source)
        except Exception as error:
            self.outcomes[engine.name] = f"{action.do.removeprefix('engine_')} failed: {error}"
            raise

    def _pause(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        engine.pause_generation(self.mode)
        self.paused.add(engine.name)

    def _send(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        lease = sync_lease(facts)
        self.touched.add(engine.name)
        self.updating.add(engine.name)
        if engine.name in self.unsure:
            engine.abort_update()
        engine.begin_update(manifest_of(facts, lease, source), self._transport(engine.name, facts, lease, source))
        self.sent_bytes[engine.name] = sum(facts.parts[part].nbytes for part in lease.sources)

    def _transport(self, name: str, facts: Facts, lease: Lease, source: Source) -> Transport:
        if self.transports[name] == "in_process":
            return InProcessTransport(source.read(facts, lease))
        buffers = [source.buffers[part] for part in lease.sources]
        return SharedMemoryTransport(tuple(Segment(b.id, b.fd, b.nbytes) for b in buffers if b.fd is not None))

    def _check(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        expected = expected_fingerprints(facts, sync_lease(facts), source.weight_names)
        if wrong := engine.check_weights(expected):
            raise VerificationFailed(f"weights in engine {engine.name}", {name: expected[name] for name in wrong}, {})

    def _end(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        engine.end_update(sync_lease(facts).version)
        self.updating.discard(engine.name)

    def _continue(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        engine.continue_generation()
        self.paused.discard(engine.name)
        self.outcomes[engine.name] = "updated"

    def _abort(self, engine: RolloutEngine, facts: Facts, source: Source) -> bool:
        """Whether it holds no version now. Never raises: an engine that can not even be told holds none either."""
        if engine.name not in self.touched:
            return _holds_nothing(engine)
        if self.outcomes[engine.name] in ("untouched", "updated"):
            self.outcomes[engine.name] = "aborted"
        self._tell(engine, engine.abort_update)
        self.updating.discard(engine.name)
        return True

    def _continue_untouched(self, engine: RolloutEngine, facts: Facts, source: Source) -> None:
        if engine.name in self.paused - self.touched:
            self._tell(engine, engine.continue_generation)
            self.paused.discard(engine.name)

    def _tell(self, engine: RolloutEngine, say: Callable[[], None]) -> None:
        try:
            say()
        except Exception as error:
            self.outcomes[engine.name] += f"; then: {error}"


def _holds_nothing(engine: RolloutEngine) -> bool:
    """As one that died, or does not answer."""
    try:
        return engine.weight_version is None
    except Exception:
        return True


def sync_lease(facts: Facts) -> Lease:
    return next(lease for lease in facts.leases if lease.reader == "sync")


def expected_fingerprints(facts: Facts, lease: Lease, names: frozenset[str]) -> dict[str, str]:
    """Name to fingerprint of these weights, over all leased parts."""
    found = (pair for part in lease.sources for pair in facts.parts[part].tensors.items())
    return {name: value for name, value in found if name in names}


def manifest_of(facts: Facts, lease: Lease, source: Source) -> UpdateManifest:
    """What the update brings. Segment 0 stands for bytes that are not in a host buffer."""
    tensors = []
    for part_id, place in lease.sources.items():
        part = facts.parts[part_id]
        segment = 0 if place is Copy.DEVICE else source.buffers[part_id].id
        for spec in source.backend.layout(part.slot):
            if spec.name in source.weight_names:
                place_of = (spec.dtype, spec.shape, spec.stride, segment, spec.offset)
                tensors.append(SentTensor(spec.name, *place_of, part.tensors[spec.name]))
    return UpdateManifest(lease.version, tuple(tensors))
