"""What every rollout engine promises, as tests: subclass ``RolloutEngineContract``, give it an engine and updates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS, RolloutEngine
from lifecycle.rollout.facts import facts_told
from lifecycle.sync.base import SentTensor, Transport, UpdateManifest
from lifecycle.sync.shared_memory import Segment, SharedMemoryTransport
from states.resources import AnyFact
from states.rollout import METHODS, ROLLOUT, EngineFact
from states.spec import SAME, MachineSpec, fold

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def shared_memory_update(
    tensors: Mapping[str, Tensor], version: int, *, segment: int = 0
) -> Iterator[tuple[UpdateManifest, SharedMemoryTransport]]:
    """An update with these tensors in one segment of shared memory, there until the context ends.

    Each tensor is stored contiguously at a multiple of 64 bytes.
    """
    import torch

    from lifecycle.fingerprint import fingerprint

    fd = os.memfd_create(f"update-{version}")
    try:
        sent, offset = [], 0
        for name, tensor in tensors.items():
            whole = tensor.detach().contiguous()
            os.pwrite(fd, whole.reshape(-1).view(torch.uint8).numpy().tobytes(), offset)
            dtype, shape = str(whole.dtype).removeprefix("torch."), tuple(whole.shape)
            sent.append(SentTensor(name, dtype, shape, whole.stride(), segment, offset, fingerprint(whole)))
            offset += -(-whole.nbytes // 64) * 64
        os.ftruncate(fd, max(offset, 1))
        transport = SharedMemoryTransport((Segment(segment, fd, max(offset, 1)),))
        yield UpdateManifest(version, tuple(sent)), transport
    finally:
        os.close(fd)


def take(engine: RolloutEngine, manifest: UpdateManifest, transport: Transport) -> None:
    """One whole sync, in the order the controller keeps, for transports the engine reads from by itself."""
    engine.pause_generation("abort")
    engine.flush_cache()
    engine.begin_update(manifest, transport)
    differing = engine.check_weights({tensor.name: tensor.fingerprint for tensor in manifest.tensors})
    assert differing == ()
    engine.end_update(manifest.version)
    engine.continue_generation()


def declared(
    spec: MachineSpec, state: str, event: str, true: frozenset[AnyFact]
) -> tuple[str, frozenset[AnyFact]] | None:
    """What the table says of this event: the state and the facts after it, or None where it is refused."""
    for row in spec.rows:
        if (row.source, row.event) == (state, event) and row.when <= true and not row.unless & true:
            guards = [spec.guard(name) for name in row.guards]
            if not all(guard.requires <= true and not guard.forbids & true for guard in guards):
                return None
            known: dict[AnyFact, bool] = dict.fromkeys(true, True)
            for name in row.effects:
                known = fold(known, spec.effect(name))
            target = state if row.target == SAME else row.target
            return target, frozenset(fact for fact, holds in known.items() if holds)
    return None


#: Ways into every state an engine with a version can be seen in, by calls; "begin" begins version 2.
SITUATIONS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "awake": (),
    "paused": (("pause_generation", "wait"),),
    "kept": (("pause_generation", "keep"),),
    "updating": (("begin", 2),),
    "updating paused": (("pause_generation", "abort"), ("begin", 2)),
    "updating without cache": (("release", ("kv_cache",)), ("begin", 2)),
    "aborted": (("begin", 2), ("abort_update", None)),
    "cache asleep": (("release", ("kv_cache",)),),
    "weights asleep": (("release", ("weights",)),),
    "asleep": (("release", POOLS),),
    "asleep paused": (("pause_generation", "abort"), ("release", POOLS)),
    "aborted asleep": (("release", ("kv_cache",)), ("begin", 2), ("abort_update", None)),
}

#: What every public event of the table is called with.
CALLS: Mapping[str, tuple[Any, ...]] = {
    "generate": ([[1]],),
    "pause_generation": ("abort",),
    "continue_generation": (),
    "flush_cache": (),
    "check_weights": ({},),
    "end_update": (2,),
    "abort_update": (),
    "release_weights": (("weights",),),
    "release_kv_cache": (("kv_cache",),),
    "resume_weights": (("weights",),),
    "resume_kv_cache": (("kv_cache",),),
}

#: Facts that a call gives and that are over when it returns.
ENDED = {"generate": frozenset({EngineFact.REQUESTS})}


class RolloutEngineContract:
    """Tests of one engine that reads by itself. Give ``make`` and ``update``; the engine may be shared by all tests."""

    prompts = ((1, 2, 3), (4, 5))

    def make(self) -> Any:
        """An engine that holds no version, with every pool resident and no update open."""
        raise NotImplementedError

    def update(self, version: int) -> AbstractContextManager[tuple[UpdateManifest, Any]]:
        """A complete update, usable while the context lasts. Its last tensor is tied to no other."""
        raise NotImplementedError

    def ready(self, version: int = 1) -> Any:
        """An engine that holds this version and generates."""
        engine = self.make()
        with self.update(version) as sent:
            take(engine, *sent)
        return engine

    def assert_refused(self, engine: Any) -> None:
        with pytest.raises(EngineError) as caught:
            engine.generate(self.prompts, max_new_tokens=1)
        assert (caught.value.engine, caught.value.operation) == (engine.name, "generate")

    def test_generates_nothing_without_a_version(self) -> None:
        """Before its first update an engine holds no version and refuses, also when it is told to go on."""
        engine = self.make()
        engine.continue_generation()

        assert engine.weight_version is None
        self.assert_refused(engine)

    def test_whole_update_gives_its_version(self) -> None:
        """After a whole update the answers carry its version."""
        engine = self.ready(3)

        answers = engine.generate(self.prompts, max_new_tokens=2, eos_token_id=None)

        assert engine.weight_version == 3
        assert [answer["weight_version"] for answer in answers] == [3, 3]
        assert [len(answer["tokens"]) for answer in answers] == [2, 2]
        assert [answer["finish_reason"] for answer in answers] == ["length", "length"]

    def test_open_update_holds_no_version(self) -> None:
        """From begin_update until end_update there is no version, and neither generating nor continuing."""
        engine = self.ready(1)
        with self.update(2) as (manifest, transport):
            engine.pause_generation()
            engine.begin_update(manifest, transport)

            assert engine.weight_version is None
            self.assert_refused(engine)
            with pytest.raises(EngineError):
                engine.continue_generation()
            engine.abort_update()

    def test_aborted_update_leaves_no_version(self) -> None:
        """An abort leaves no version, paused; a later whole update makes the engine whole again."""
        engine = self.ready(1)
        with self.update(2) as (manifest, transport):
            engine.pause_generation()
            engine.begin_update(manifest, transport)
            engine.abort_update()

            assert engine.weight_version is None
            assert engine.status()["paused"]
            self.assert_refused(engine)
            take(engine, manifest, transport)
        assert engine.weight_version == 2
        assert engine.generate(self.prompts, max_new_tokens=1)

    def test_abort_is_safe_at_any_time(self) -> None:
        """With no update open an abort still leaves the engine without a version and paused, also twice."""
        engine = self.ready(1)
        engine.abort_update()
        engine.abort_update()

        assert engine.weight_version is None
        self.assert_refused(engine)

    @pytest.mark.parametrize("version", [1, 3])
    def test_end_with_another_version_is_refused(self, version: int) -> None:
        """end_update takes the version that begin_update announced, and the update stays open for it."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            engine.begin_update(manifest, transport)
            with pytest.raises(EngineError):
                engine.end_update(version)

            assert engine.weight_version is None
            engine.end_update(2)
        assert engine.weight_version == 2

    def test_end_without_begin_is_refused(self) -> None:
        """end_update without an open update is refused and changes nothing."""
        engine = self.ready(1)
        with pytest.raises(EngineError):
            engine.end_update(1)
        assert engine.weight_version == 1

    def test_second_begin_is_refused(self) -> None:
        """While an update is open another one is refused, and the open one can still be ended."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            engine.begin_update(manifest, transport)
            with pytest.raises(EngineError):
                engine.begin_update(manifest, transport)
            engine.end_update(2)
        assert engine.weight_version == 2

    def test_incomplete_update_never_becomes_a_version(self) -> None:
        """An update in which a name of the model is missing is refused by that name."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            missing = manifest.tensors[-1].name
            with pytest.raises(EngineError, match=missing):
                take(engine, evolve(manifest, tensors=manifest.tensors[:-1]), transport)
            engine.abort_update()
            assert engine.weight_version is None

    def test_unknown_name_never_becomes_a_version(self) -> None:
        """An update with a name the model lacks is refused by that name."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            stranger = evolve(manifest.tensors[-1], name="stranger.weight")
            with pytest.raises(EngineError, match=r"stranger\.weight"):
                take(engine, evolve(manifest, tensors=(*manifest.tensors, stranger)), transport)
            engine.abort_update()
            assert engine.weight_version is None

    def test_check_weights_names_what_differs(self) -> None:
        """check_weights reports exactly the names that differ or that the engine lacks."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            engine.begin_update(manifest, transport)
            expected = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
            name = manifest.tensors[0].name
            wrong = f"{int(expected[name], 16) ^ 1:016x}"

            assert engine.check_weights(expected) == ()
            assert set(engine.check_weights({**expected, name: wrong, "stranger": wrong})) == {name, "stranger"}
            engine.end_update(2)

    def test_same_version_may_come_again(self) -> None:
        """The version it holds may be sent again."""
        engine = self.ready(2)
        with self.update(2) as sent:
            take(engine, *sent)
        assert engine.weight_version == 2

    def test_older_version_is_refused(self) -> None:
        """An older version than the one it holds is refused, and the newer one stays."""
        engine = self.ready(2)
        with self.update(1) as (manifest, transport):
            engine.pause_generation()
            with pytest.raises(EngineError, match="older"):
                engine.begin_update(manifest, transport)
        engine.continue_generation()
        assert engine.weight_version == 2
        assert engine.generate(self.prompts, max_new_tokens=1)

    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    def test_paused_engine_refuses(self, mode: Any) -> None:
        """Every way of pausing closes admission, may be repeated, and continue_generation opens it again."""
        engine = self.ready(1)
        engine.pause_generation(mode)
        engine.pause_generation(mode)
        self.assert_refused(engine)
        engine.continue_generation()
        engine.continue_generation()
        assert engine.generate(self.prompts, max_new_tokens=1)

    def test_unknown_pause_mode_is_refused(self) -> None:
        """An unknown mode is refused by the known ones, and the engine still generates."""
        engine = self.ready(1)
        with pytest.raises(EngineError, match="abort, wait, keep"):
            engine.pause_generation("retract")
        assert engine.generate(self.prompts, max_new_tokens=1)

    @pytest.mark.parametrize("pool", POOLS)
    def test_released_pool_refuses_generation(self, pool: str) -> None:
        """With any pool released nothing is generated; status tells the pools apart."""
        engine = self.ready(1)
        engine.release((pool,))
        engine.release((pool,))
        states = {name: told["state"] for name, told in engine.status()["pools"].items()}

        assert states == {name: "released" if name == pool else "resident" for name in POOLS}
        self.assert_refused(engine)
        engine.resume((pool,))
        engine.resume((pool,))

    def test_released_weights_lose_their_version(self) -> None:
        """Resumed weights have no contents: no version until an update, and an older one may come then."""
        engine = self.ready(5)
        engine.release()
        assert engine.weight_version is None
        engine.resume()
        assert engine.weight_version is None
        self.assert_refused(engine)
        with self.update(4) as sent:
            take(engine, *sent)
        assert engine.weight_version == 4

    def test_released_cache_keeps_the_version(self) -> None:
        """Releasing the cache alone takes no weights; after resume the engine generates at once."""
        engine = self.ready(1)
        engine.release(("kv_cache",))
        assert engine.weight_version == 1
        engine.resume(("kv_cache",))
        assert engine.generate(self.prompts, max_new_tokens=1)

    def test_released_weights_take_no_update(self) -> None:
        """begin_update and check_weights are refused while the weights pool is released."""
        engine = self.ready(1)
        engine.release(("weights",))
        with self.update(2) as (manifest, transport):
            with pytest.raises(EngineError, match="released"):
                engine.begin_update(manifest, transport)
            with pytest.raises(EngineError, match="released"):
                engine.check_weights({manifest.tensors[0].name: manifest.tensors[0].fingerprint})

    def test_open_update_refuses_release(self) -> None:
        """Memory that is being written to can not be released."""
        engine = self.make()
        with self.update(2) as (manifest, transport):
            engine.begin_update(manifest, transport)
            with pytest.raises(EngineError):
                engine.release()
            engine.end_update(2)
        assert engine.weight_version == 2

    @pytest.mark.parametrize("operation", ["release", "resume"])
    def test_unknown_pool_is_refused(self, operation: str) -> None:
        """An unknown pool is refused by the known ones, and the others named with it are left alone."""
        engine = self.ready(1)
        with pytest.raises(EngineError, match=f"lora.*{', '.join(POOLS)}"):
            getattr(engine, operation)(("weights", "lora"))
        assert engine.weight_version == 1

    def test_receive_is_refused(self) -> None:
        """An engine that reads by itself takes no buckets."""
        with pytest.raises(EngineError):
            self.make().receive(object())

    @pytest.mark.parametrize("event", [*CALLS, "begin_update"])
    @pytest.mark.parametrize("situation", SITUATIONS)
    def test_table_decides(self, situation: str, event: str) -> None:
        """In every state every event does what the table says; refused, it changes nothing and says what is allowed."""
        engine = self.ready(1)
        with self.update(2) as sent:
            for method, argument in SITUATIONS[situation]:
                if method == "begin":
                    engine.begin_update(*sent)
                else:
                    getattr(engine, method)(*(() if argument is None else (argument,)))
            before = engine.status()
            expected = declared(ROLLOUT, before["state"], event, facts_told(before))
            call = getattr(engine, METHODS.get(event, event))
            arguments = sent if event == "begin_update" else CALLS[event]
            if expected is None:
                with pytest.raises(EngineError) as refused:
                    call(*arguments)
                assert f"State: {before['state']}" in refused.value.reason
                assert "Allowed here: " in refused.value.reason
                expected = before["state"], facts_told(before)
            else:
                call(*arguments)
            after = engine.status()

        # generate returns when its request has ended
        assert (after["state"], facts_told(after)) == (expected[0], expected[1] - ENDED.get(event, frozenset()))
        assert after["moving"] is None
