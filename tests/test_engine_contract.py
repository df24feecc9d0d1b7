"""The rollout engines keep the contract of ``lifecycle.testing.engine_contract``."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from core_engine import SMALL, CoreEngine
from transformers import AutoModelForCausalLM

from lifecycle.errors import EngineError
from lifecycle.fingerprint import fingerprint
from lifecycle.rollout.local import LocalEngine
from lifecycle.sync.base import SentTensor, UpdateManifest
from lifecycle.sync.shared_memory import SharedMemoryTransport
from lifecycle.testing.engine_contract import RolloutEngineContract, shared_memory_update, take
from lifecycle.testing.engines import FakeEngine


def fake_manifest(version=1, names=("a", "b")):
    tensors = (SentTensor(name, "float32", (2,), (1,), 0, 0, f"{index:016x}") for index, name in enumerate(names))
    return UpdateManifest(version, tuple(tensors))


class WithTensors:
    """A transport whose tensors can be had directly."""

    name = "shared_memory"
    needs_host_copy = False

    def __init__(self, tensors):
        self._tensors = tensors

    def tensors(self):
        return self._tensors


@pytest.fixture(name="local_engine", scope="module")
def _local_engine():
    with LocalEngine(SMALL, threads=1) as engine:
        yield engine


class TestFakeEngine(RolloutEngineContract):
    """The fake refuses what the real one refuses."""

    def make(self):
        return FakeEngine(names=("a", "b"))

    @contextmanager
    def update(self, version):
        yield fake_manifest(version), SharedMemoryTransport(())


class TestLocalEngine(RolloutEngineContract):
    """The real one, in one process for all tests."""

    @pytest.fixture(autouse=True)
    def _shared(self, local_engine):
        self.engine = local_engine
        self.weights = AutoModelForCausalLM.from_config(SMALL).state_dict()

    def make(self):
        self.engine.abort_update()
        self.engine.resume()
        self.engine.continue_generation()
        return self.engine

    def update(self, version):
        return shared_memory_update(self.weights, version)


@pytest.fixture(name="core_engine", scope="module")
def _core_engine():
    engine = CoreEngine()
    yield engine
    engine.close()


class TestCoreEngine(RolloutEngineContract):
    """The real one without its process, one for all tests."""

    @pytest.fixture(autouse=True)
    def _shared(self, core_engine):
        self.engine = core_engine
        self.weights = AutoModelForCausalLM.from_config(SMALL).state_dict()

    def make(self):
        self.engine.abort_update()
        self.engine.resume()
        self.engine.continue_generation()
        return self.engine

    def update(self, version):
        return shared_memory_update(self.weights, version)


@pytest.fixture
def fake():
    return FakeEngine(names=("a", "b"))


def test_fake_fails_where_asked(fake):
    """A method in ``fail_on`` raises and does nothing; every call is on record."""
    fake.fail_on = {"end_update"}
    fake.begin_update(fake_manifest(), SharedMemoryTransport(()))

    with pytest.raises(EngineError, match="asked to fail"):
        fake.end_update(1)
    assert fake.weight_version is None
    fake.fail_on.clear()
    fake.end_update(1)
    assert fake.weight_version == 1
    assert [name for name, _ in fake.calls] == ["begin_update", "end_update", "end_update"]


def test_fake_dies_where_asked(fake):
    """A dead engine refuses everything until it is restarted, and holds no version then."""
    take(fake, fake_manifest(), SharedMemoryTransport(()))
    fake.die_on = {"flush_cache"}
    with pytest.raises(EngineError, match="died"):
        fake.flush_cache()
    fake.die_on = set()

    assert (fake.alive, fake.weight_version) == (False, None)
    with pytest.raises(EngineError, match="died"):
        fake.status()
    fake.restart()
    assert (fake.alive, fake.weight_version) == (True, None)
    fake.close()
    assert not fake.alive


def test_fake_reports_corruption(fake):
    """Names in ``corrupted`` differ, whatever came."""
    fake.corrupted = {"b"}
    fake.begin_update(fake_manifest(), SharedMemoryTransport(()))
    assert fake.check_weights({"a": f"{0:016x}", "b": f"{1:016x}"}) == ("b",)


def test_fake_keeps_the_tensors_it_is_offered():
    """Where a transport offers tensors, fingerprints are of these and not of the manifest."""
    engine, tensor = FakeEngine(), torch.arange(2.0)
    engine.begin_update(fake_manifest(names=("a",)), WithTensors({"a": tensor}))

    sent = fingerprint(tensor)
    tensor += 1  # the sender trains on

    assert engine.check_weights({"a": sent}) == ()
    assert engine.weights["a"].tolist() == [0.0, 1.0]
    assert engine.check_weights({"a": f"{0:016x}"}) == ("a",)


def test_fake_takes_buckets():
    """A pushed update ends only when every name has come."""
    engine = FakeEngine(names=("a", "b"), transports=("broadcast",), pushed=True)
    transport = WithTensors({})
    with pytest.raises(EngineError, match="broadcast"):
        engine.begin_update(fake_manifest(), transport)
    transport.name = "broadcast"
    with pytest.raises(EngineError, match="No update is open"):
        engine.receive({"a": 1})
    engine.begin_update(fake_manifest(), transport)
    engine.receive({"a": 1})
    with pytest.raises(EngineError, match="missing names: b"):
        engine.end_update(1)
    engine.receive({"b": 1})
    engine.end_update(1)
    assert engine.weight_version == 1


def test_fake_request_is_aborted_by_a_pause():
    """A pause ends a running request of another thread with the tokens so far."""
    engine, answers = FakeEngine(token_seconds=0.002), []
    take(engine, fake_manifest(7), SharedMemoryTransport(()))
    thread = threading.Thread(target=lambda: answers.extend(engine.generate([[1]], max_new_tokens=10_000)))
    thread.start()
    while not engine.status()["requests"]["running"]:
        pass
    engine.pause_generation("abort")
    thread.join()

    (answer,) = answers
    assert (answer["finish_reason"], answer["weight_version"]) == ("abort", 7)
    assert set(answer["tokens"]) <= {7}


def test_fake_keeps_a_request_until_it_goes_on():
    """A kept request of the fake stands still, is refused nothing, and finishes after continue_generation."""
    engine, answers = FakeEngine(token_seconds=0.002), []
    take(engine, fake_manifest(7), SharedMemoryTransport(()))
    thread = threading.Thread(target=lambda: answers.extend(engine.generate([[1]], max_new_tokens=20)))
    thread.start()
    while not engine.status()["requests"]["running"]:
        pass
    with pytest.raises(EngineError, match="pause_generation first"):
        engine.begin_update(fake_manifest(8), SharedMemoryTransport(()))
    with pytest.raises(EngineError, match="pause_generation first"):
        engine.flush_cache()
    engine.pause_generation("keep")
    with pytest.raises(EngineError, match="not finished"):
        engine.release()
    assert engine.status()["requests"]["frozen"] == 1
    engine.continue_generation()
    thread.join()
    assert answers == [{"tokens": [7] * 20, "finish_reason": "length", "weight_version": 7}]


def test_continue_overtakes_a_waiting_pause():
    """A pause that waits and is overtaken by continue_generation says so."""
    engine, errors = FakeEngine(token_seconds=0.01), []
    take(engine, fake_manifest(7), SharedMemoryTransport(()))

    def pause():
        try:
            engine.pause_generation("wait")
        except EngineError as error:
            errors.append(error)

    generating = threading.Thread(target=lambda: engine.generate([[1]], max_new_tokens=10_000))
    pausing = threading.Thread(target=pause)
    generating.start()
    while not engine.status()["requests"]["running"]:
        pass
    pausing.start()
    while engine.status()["paused"] != "wait":
        pass
    engine.continue_generation()
    pausing.join()
    engine.pause_generation("abort")
    generating.join()
    assert "continued" in errors[0].reason


def test_stopped_engine_takes_nothing():
    """A state that was stopped admits nothing, and whoever waits for a request is told."""
    engine = FakeEngine()
    take(engine, fake_manifest(7), SharedMemoryTransport(()))
    engine._state.stop()
    with pytest.raises(EngineError, match="stopping"):
        engine.generate([[1]])
    assert engine._state.take() is None


def test_fake_needs_no_torch():
    """The fake and the front of the real engine can be imported where there is no torch."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import lifecycle.testing.engines, lifecycle.rollout.local"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
