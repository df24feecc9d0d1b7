"""Ranks in one process, each in a thread of its own: ``RANK_RULES``, to be seen and tested without a cluster.

Theory of operation. An event is planned on every rank, and asked of all at once if none refuses. Where the row agrees
the ranks meet right before: each says that it is ready, and waits for the others. One that failed on the way says so
instead, and then every other raises RanksDisagree in the middle of its row, which undoes what it did. Behind the
meeting nobody can be held back any more, so where ranks end up apart all are faulted, and ``recover`` brings them
together again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from lifecycle.errors import LifecycleError, RanksDisagree
from lifecycle.own import EffectCall, Handler
from states.joint import RANK_RULES

if TYPE_CHECKING:
    from lifecycle.controller import ActorLifecycle

_READY = "ready"


class _Round:
    """One event asked of these ranks: what each has said so far."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = ranks
        self._said: dict[int, str] = {}
        self._changed = threading.Condition()

    def say(self, rank: int, what: str) -> None:
        with self._changed:
            self._said.setdefault(rank, what)
            self._changed.notify_all()

    def meet(self, rank: int, timeout: float) -> None:
        """Returns when every rank is ready. Raises RanksDisagree when one is not, or says nothing in time."""
        self.say(rank, _READY)
        with self._changed:
            self._changed.wait_for(lambda: len(self._said) == len(self._ranks), timeout)
            said = {n: self._said.get(n, f"no word within {timeout:g} s") for n in self._ranks}
            if any(what != _READY for what in said.values()):
                # late ones must not go on alone
                self._said.update({n: what for n, what in said.items() if n not in self._said})
                raise RanksDisagree(said)


class LocalRanks:
    """Drives several actors as the ranks of one.

    Make each with ``machine=RANKED, perform=ranks.perform(rank)``, then ``join`` them in the order of their ranks.
    ``timeout``: seconds that a rank waits for the others.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self._size, self._timeout = size, timeout
        self._actors: tuple[ActorLifecycle, ...] = ()
        self._round: _Round | None = None
        self._asking = threading.Lock()

    def perform(self, rank: int) -> dict[str, Handler]:
        """The handlers of this rank's actor."""

        def meet(call: EffectCall) -> None:
            # an event that its owner asked of one rank alone has nobody to meet
            if self._round is None:
                raise RanksDisagree({rank: f"{call.event} was asked of this rank alone: ask LocalRanks"})
            self._round.meet(rank, self._timeout)

        return {"meet_ranks": meet}

    def join(self, actors: Sequence[ActorLifecycle]) -> None:
        if len(actors) != self._size:
            raise ValueError(f"{len(actors)} actors for {self._size} ranks")
        self._actors = tuple(actors)

    @property
    def states(self) -> dict[int, str]:
        return {rank: str(actor.state) for rank, actor in enumerate(self._actors)}

    def ask(self, event: str, *arguments: str) -> None:
        """One event of all ranks, by the name of the actor's method. All have moved, or none has, or all are FAULTED.

        Raises the refusal where all refuse alike, RanksDisagree where only some do, or one failed and all have undone
        what they did; and, where all are FAULTED now, the error of the first rank that failed.
        """
        with self._asking:
            if len({actor.state.name for actor in self._actors}) > 1:
                raise RanksDisagree(self.states)
            self._require_allowed(event, arguments)
            everybody = range(self._size)
            self._end(event, everybody, self._run(event, arguments, everybody))
            if event == "recover":
                self._share_loss()

    def _require_allowed(self, event: str, arguments: Sequence[str]) -> None:
        plans = {rank: actor.plan(event, *arguments) for rank, actor in enumerate(self._actors)}
        refusals = {rank: plan.refusal for rank, plan in plans.items() if plan.refusal is not None}
        if len(refusals) == self._size and len({str(refusal) for refusal in refusals.values()}) == 1:
            raise refusals[0]
        if refusals:
            raise RanksDisagree({rank: str(refusals.get(rank, "could go on")) for rank in plans})

    def _run(self, event: str, arguments: Sequence[str], ranks: Collection[int]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        this = self._round = _Round(ranks)

        def act(rank: int, actor: ActorLifecycle) -> None:
            try:
                getattr(actor, event)(*arguments)
                this.say(rank, "done, without meeting the others")
            except Exception as error:
                errors[rank] = error
                this.say(rank, f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=act, args=(rank, self._actors[rank])) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._round = None
        return dict(sorted(errors.items()))

    def _share_loss(self) -> None:
        """Where one has recovered to ASLEEP, because its weights were released, all go there."""
        awake = [rank for rank, actor in enumerate(self._actors) if actor.state.name != "ASLEEP"]
        if len(awake) < self._size:
            self._end("recover", awake, self._run("sleep", (), awake))

    def _end(self, event: str, ranks: Collection[int], errors: Mapping[int, Exception]) -> None:
        """Raise what came of it, if anything failed, having faulted those that went on without the others."""
        if not errors:
            return
        own = {rank: error for rank, error in errors.items() if not isinstance(error, RanksDisagree)}
        first = next(iter((own or errors).values()))
        if len(errors) == len(ranks) and all(actor.state.name != "FAULTED" for actor in self._actors):
            raise RanksDisagree({rank: _words(error) for rank, error in errors.items()}) from first
        for actor in self._actors:
            if actor.state.name not in ("FAULTED", "CLOSED"):
                with actor._exclusive(RANK_RULES.spread, wait=True):
                    actor._fault(actor._machine.state, RANK_RULES.agree)
        first.add_note(f"{event} failed on rank {', '.join(map(str, own or errors))}; all ranks are FAULTED now")
        raise first


def _words(error: Exception) -> str:
    if isinstance(error, RanksDisagree):
        return "ready; undone"
    return str(error) if isinstance(error, LifecycleError) else f"{type(error).__name__}: {error}"
