"""A real engine with a real model, in this process: the core of the local engine behind the front's interface."""

from __future__ import annotations

import threading

from transformers import LlamaConfig

from lifecycle.errors import EngineError
from lifecycle.rollout.base import POOLS
from lifecycle.rollout.core import EngineCore
from lifecycle.rollout.generation import build_model

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class CoreEngine:
    """``EngineCore`` as a RolloutEngine. Close it: a thread of it generates."""

    transports = ("shared_memory",)

    def __init__(self, name="core", config=SMALL):
        self.name = name
        self.core = EngineCore(name, build_model(config.to_dict(), "float32", "sdpa"))
        self._thread = threading.Thread(target=self.core.run, daemon=True)
        self._thread.start()

    def close(self):
        self.core.stop()
        self._thread.join()

    @property
    def weight_version(self):
        return self.core.weight_version

    def generate(self, prompts, **options):
        outcomes, ended = [], threading.Event()
        self.core.admit(prompts, options, lambda outcome: (outcomes.append(outcome), ended.set()))
        ended.wait()
        if isinstance(outcomes[0], EngineError):
            raise outcomes[0]
        return outcomes[0]

    def pause_generation(self, mode="abort"):
        self.core.pause_generation(mode)

    def continue_generation(self):
        self.core.continue_generation()

    def flush_cache(self):
        self.core.flush_cache()

    def begin_update(self, manifest, transport):
        segments = [{"id": segment.id, "nbytes": segment.nbytes} for segment in transport.segments]
        self.core.begin_update(manifest.to_plain(), segments, [segment.fd for segment in transport.segments])

    def receive(self, bucket):
        raise EngineError(self.name, "receive", "it reads shared memory by itself")

    def check_weights(self, fingerprints):
        return tuple(self.core.check_weights(fingerprints))

    def end_update(self, version):
        self.core.end_update(version)

    def abort_update(self):
        self.core.abort_update()

    def release(self, pools=POOLS):
        self.core.release(pools)

    def resume(self, pools=POOLS):
        self.core.resume(pools)

    def status(self):
        return self.core.status()
