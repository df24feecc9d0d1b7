"""Actor and engines asked for anything in any order, engines failing at will: never do both have memory."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rig import make_rig

from lifecycle.colocated import Colocated
from lifecycle.errors import EngineError, LifecycleError, MoveStopped, TransitionRefused
from lifecycle.testing.engines import FakeEngine
from states.resources import Region

REGIONS = {Region.WEIGHTS, Region.OPTIMIZER, Region.REST}
METHODS = ("release", "resume", "begin_update", "end_update", "pause_generation", "continue_generation", "status")
pools = st.sampled_from((("weights",), ("kv_cache",), ("weights", "kv_cache")))
victims = st.integers(0, 1)


class ColocatedMachine(RuleBasedStateMachine):
    """Through ``Colocated`` all, and past it what is allowed directly: sleeping, releasing, generating."""

    @initialize()
    def attach(self):
        self.rig = make_rig(host="shared")
        self.engines = [FakeEngine(name, transports=("in_process",)) for name in ("first", "second")]
        for engine in self.engines:
            engine.release()
        self.colocated = Colocated(self.rig.actor, self.engines, timeout=20)

    def holding(self):
        """What is really mapped."""
        actor = bool(self.rig.actor.memory.resident() & REGIONS)
        pools = [engine._state.snapshot()["pools"].values() for engine in self.engines]
        return actor, any("resident" in states for states in pools)

    def attempt(self, act):
        """What was refused has moved nothing; whatever happens, what is told is what is."""
        before = self.holding()
        try:
            act()
        except MoveStopped:
            return False
        except TransitionRefused:
            assert self.holding() == before
            return False
        return True

    @rule(tag=st.sampled_from(("actor", "ref")))
    def wake_up(self, tag):
        free = self.colocated.device_taken() is None
        if self.attempt(lambda: self.colocated.wake_up(tag)):
            assert free or self.colocated.holders().keys() >= {"actor"}

    @rule()
    def sleep(self):
        self.attempt(self.colocated.sleep)

    @rule(pools=pools)
    def release(self, pools):
        self.attempt(lambda: self.colocated.release(pools))

    @rule(pools=pools)
    def resume(self, pools):
        self.attempt(lambda: self.colocated.resume(pools))

    @rule(tag=st.sampled_from(("actor", "actor", "ref")))
    def to_training(self, tag):
        if self.attempt(lambda: self.colocated.to_training(tag)):
            assert self.colocated.state.name == "TRAINING"

    @rule(sync=st.sampled_from((True, True, False)))
    def to_rollout(self, sync):
        if self.attempt(lambda: self.colocated.to_rollout(sync)) and sync:
            assert self.colocated.state.name == "ROLLOUT"
            for engine in self.engines:
                assert engine.generate([[1]], max_new_tokens=1)[0]["weight_version"] == self.rig.actor.tags["actor"]

    @rule(method=st.sampled_from(METHODS), victim=victims, how=st.sampled_from(("fail_on", "die_on")))
    def trouble(self, method, victim, how):
        getattr(self.engines[victim], how).add(method)

    @rule()
    def mend(self):
        """Everything works from here on; a dead engine that comes back maps its memory, unless there is no room."""
        for engine in self.engines:
            engine.fail_on, engine.die_on = set(), set()
            if not engine.alive:
                if self.holding()[0]:
                    self.rig.actor.sleep()
                engine.restart()

    @rule(victim=victims)
    def generate(self, victim):
        try:
            self.engines[victim].generate([[1]], max_new_tokens=1)
        except EngineError:
            return
        assert not self.holding()[0]

    @rule()
    def train(self):
        try:
            self.rig.train()
        except LifecycleError:
            assert self.rig.state != "RESIDENT"

    @invariant()
    def out_before_in(self):
        if hasattr(self, "rig"):
            assert self.holding() != (True, True)

    @invariant()
    def told_is_held(self):
        """What is really mapped is among what is told, so nothing is ever too early."""
        if hasattr(self, "rig"):
            actor, engines = self.holding()
            told = self.colocated.holders()
            assert ("actor" in told) == actor
            assert not engines or told.keys() - {"actor"}

    def teardown(self):
        """From anywhere there is a way back."""
        if hasattr(self, "rig"):
            self.mend()
            self.rig.actor.sleep()  # it may be awake for another tag
            self.colocated.to_training()
            self.rig.check()


TestColocatedMachine = ColocatedMachine.TestCase
TestColocatedMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
