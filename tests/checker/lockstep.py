"""Runs the checker's moves and the run time's events side by side, and says where they disagree.

Theory of operation. States are explored breadth first as pairs of an abstract node and a concrete one, that is facts
and things. Each move of a node is run abstractly by ``explore.Runner`` and concretely by the real ``Executor`` on a
world of tokens: with every choice that the trainer has (``Choice``), and failing at every action in every way that
leaves something different behind, as well as at every action of the unwinding that follows. The two must end in the
same states, and after each effect of a success the facts must be among what the abstract effect may lead to.

[Note: frame] What a move leads to is taken over between nodes that differ only in bits that the move neither reads nor
writes, as ``explore`` does. But every new node is reached by a concrete run of its own, which must end where it should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from abstraction import Abstraction, lies
from attrs import define, evolve, field, frozen
from choosing import Choice, acted, choices, chosen, lacking, parts_of, resolved, written
from concrete import FakeWorld, Injected, Lost, executor
from things import Pair, first_pair, fresh

from lifecycle.actions import Call
from lifecycle.checker.formula import FALSE, Expr
from lifecycle.checker.ground import Program, _promised_rotation, _row_guard, _variants
from lifecycle.checker.runner import Node, RunMove, Runner
from lifecycle.checker.steps import Asked
from lifecycle.executor import EffectStopped, Executor
from lifecycle.plan import preview
from lifecycle.references import prune
from lifecycle.versions import ACTOR
from states.resources import Region, Slot
from states.spec import Effect, FlatRow

#: Actions that change the world, so that failing after them is another thing than failing before.
_ACTING = frozenset(
    (
        *("copy_out", "back_up", "adopt_optimizer", "drop_workspaces", "discard_grads", "zero_grads"),
        *(
            "suspend_groups",
            "reload_groups",
            "raise_sync_groups",
            "lower_sync_groups",
            "pause",
            "resume",
            "copy_in",
            "exchange",
            "put_together",
        ),
        *("remove_hooks", "free_copies", "engine_pause", "engine_send", "engine_end", "engine_abort"),
        *("engine_continue", "engine_continue_untouched"),
    )
)
#: Actions of which something can not be relied on any more as soon as they begin.
_DURING = frozenset(
    ("copy_in", "arrive", "exchange", "adopt_optimizer", "pause", "bring_back", "engine_send", "engine_abort")
)
_TARGETED = ("load", "tag", "wake_up", "switch", "start_sync")

Plan = tuple[tuple[int, str], ...]  # number of an action in the event, and how it fails


@frozen
class Asking:
    """One event as it can be asked for in a flat state, with the checker's move for it, where it has one."""

    row: FlatRow
    asked: Asked
    guard: Expr
    move: RunMove | None

    @property
    def text(self) -> str:
        words = (self.asked.event, self.asked.tag, self.asked.of, self.asked.rotate, self.asked.host_only or None)
        return f"{' '.join(str(word) for word in words if word)} from {self.row.source}"


def askings(runner: Runner) -> dict[str, list[Asking]]:
    """By flat state, everything that can be asked for there."""
    program = runner.program
    table, events = program.table, (m for m in chain.from_iterable(runner.moves) if not m.move.environment)
    left = {flat: [m for m in runner.moves[n] if not m.move.environment] for n, flat in enumerate(runner.flats)}
    assert sum(map(len, left.values())) == len(list(events))
    found: dict[str, list[Asking]] = {flat: [] for flat in runner.flats}
    for row in table.all_rows:
        for asked, extra in _variants(program.words, row, table.shown[row.source]):
            guard = extra & _row_guard(row, asked) & _promised_rotation(table, row, asked)
            move = None if guard == FALSE else left[row.source].pop(0)
            assert move is None or (move.move.event, move.move.target) == (row.row.event, row.target)
            found[row.source].append(Asking(row, asked, guard, move))
    assert not any(left.values())
    return found


class Watched(Executor):
    """Notes what is known and what is, after every effect and after every failure."""

    __slots__ = ("after_effects", "after_failures", "begun")

    def _do(self, effect, todo, call):
        if self.world.plan.get(len(self.world.done)) == "early":
            self.world.done.append(todo[0])
            raise Injected(effect)
        if todo:
            self.begun.add(len(self.world.done))
        super()._do(effect, todo, call)
        self.after_effects.append((effect, Pair(self.facts, self.world.things)))

    def look_again(self, syncing=False):
        super().look_again(syncing)
        self.after_failures.append(Pair(self.facts, self.world.things))


@frozen
class Ended:
    """One concrete run: where it ended, and what it passed."""

    flat: str
    pair: Pair
    planned: Any
    actions: tuple[str, ...]
    passed: tuple[tuple[str, Pair], ...]
    failed: tuple[Pair, ...]
    begun: frozenset[int]  # actions that are the first of their effect
    complaints: tuple[str, ...]


@define
class Lockstep:
    """``disagreements``: texts. ``pairs``: the concrete side of each node that was reached."""

    program: Program
    runner: Runner = field(init=False)
    alpha: Abstraction = field(init=False)
    asked: dict[str, list[Asking]] = field(init=False)
    effects: dict[str, Effect] = field(init=False)
    pairs: dict[Node, Pair] = field(factory=dict)
    disagreements: list[str] = field(factory=list)
    runs: int = 0
    _known: dict[tuple[str, int], dict[Node, tuple[Choice, Plan]]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.runner = Runner(self.program)
        self.alpha = Abstraction(self.program)
        self.asked = askings(self.runner)
        self.effects = {effect.name: effect for effect in self.program.table.spec.effects}

    # one event

    def call(self, asking: Asking, pair: Pair) -> Call:
        asked, one = asking.asked, self.program.model.instance
        if asked.event in ("finish_sync", "fail_sync"):
            tag = pair.things.sync_tag
        else:
            tag = asked.tag if asked.event in _TARGETED else None
        return Call(
            asked.event,
            pair.facts,
            self.program.table.shown[asking.row.source],
            tag=tag,
            of=asked.of,
            engines=one.engines,
            host_copy=asked.host_only,
            rotate=((asked.rotate, asked.of or ACTOR),) if asked.rotate else (),
            keep=frozenset(map(Region, one.keep)),
            restore_aborted=one.restore_aborted,
        )

    def world(self, pair: Pair, choice: Choice, plan: Plan = ()) -> FakeWorld:
        things = pair.things
        contents = {**things.contents, **written(pair, choice), **resolved(pair.facts, choice)}
        if choice.steps:
            contents[Slot.OPTIMIZER] = fresh()
        return FakeWorld(
            evolve(things, contents=contents), dict(plan), choice.appeared, choice.grads_back, choice.brought
        )

    def run(self, asking: Asking, pair: Pair, choice: Choice, plan: Plan = (), planned: Any = None) -> Ended:
        """What ``lifecycle.steps`` does with a row that was found, without locks and errors."""
        self.runs += 1
        row = asking.row
        if asking.asked.event == "fault":
            return Ended(row.target, pair, (), (), (), (), frozenset(), ())
        pair = evolve(pair, facts=chosen(pair.facts, choice))
        call, world = self.call(asking, pair), self.world(pair, choice, plan)
        planned = preview(row, call.before, call, world, world.settings()) if planned is None else planned
        one = executor(world, pair.facts, self.effects, Watched)
        one.after_effects, one.after_failures, one.begun = [], [], set()
        flat = row.target
        try:
            one.run(row, call, planned)
            if row.row.event == "start_sync":
                world._let(sync_tag=call.tag)
        except EffectStopped as stop:
            if not isinstance(stop.failure.cause, Injected | Lost):
                raise stop.failure.cause from None
            flat = row.source if stop.failure.rolled_back else self.program.faults[row.source]
        world.remember(one.facts)
        facts = prune(one.facts)
        world.forget(facts)
        if world.things.hooks:  # a close has nothing to keep
            world.complaints += lies(facts, world.things, untracked="adopt_weights" in row.row.effects)
        done = tuple(action.do for action in world.done)
        passed, failed = tuple(one.after_effects), tuple(one.after_failures)
        return Ended(
            flat,
            Pair(facts, world.things),
            planned,
            done,
            passed,
            failed,
            frozenset(one.begun),
            tuple(world.complaints),
        )

    def node(self, ended: Ended) -> Node:
        """The abstract node of it, as far as it is compared."""
        if not ended.pair.things.hooks:
            return self.runner.number[ended.flat], 0
        return self.runner.number[ended.flat], self.alpha(ended.pair)

    # all that may come of it

    def outcomes(self, asking: Asking, pair: Pair, bits: int) -> dict[Node, tuple[Choice, Plan]]:
        """Every concrete end, with one way to bring it about. Compares successes effect by effect."""
        found: dict[Node, tuple[Choice, Plan]] = {}
        for choice in choices(asking.row.row.effects, pair):
            ended = self._run_noted(asking, pair, choice, (), found)
            if asking.asked.event == "fault":
                continue
            if pair.things.hooks:
                self._compare_effects(asking, ended, bits, choice)
            self._failing(asking, pair, choice, ended, found)
            if "bring_back" in ended.actions:
                number = ended.actions.index("bring_back")
                for brought in parts_of(lacking(pair)):
                    self._run_noted(
                        asking, pair, evolve(choice, brought=brought), ((number, "after"),), found, ended.planned
                    )
        return found

    def _run_noted(self, asking: Asking, pair: Pair, choice: Choice, plan: Plan, found: dict, planned=None) -> Ended:
        ended = self.run(asking, pair, choice, plan, planned)
        found.setdefault(self.node(ended), (choice, plan))
        for text in ended.complaints:
            self._say(asking, f"{text} ({choice}, failing {plan}, after {ended.actions})")
        return ended

    def _failing(self, asking: Asking, pair: Pair, choice: Choice, ended: Ended, found: dict) -> None:
        """At every action, and then at every action of what undoes it, and so on."""
        seen: set[object] = set()
        todo: list[tuple[Plan, Ended]] = [((), ended)]
        while todo:
            plan, before = todo.pop()
            first = plan[-1][0] + 1 if plan else 0
            for number in range(first, len(before.actions)):
                action = before.actions[number]
                for phase in _phases(action, number in before.begun):
                    longer = (*plan, (number, phase))
                    after = self._run_noted(asking, pair, choice, longer, found, ended.planned)
                    unwinding = after.actions[number + 1 :]
                    key = (self.alpha(after.failed[-1]), self.node(after)[0], unwinding, len(longer))
                    if unwinding and key not in seen:
                        seen.add(key)
                        todo.append((longer, after))

    def _compare_effects(self, asking: Asking, ended: Ended, bits: int, choice: Choice) -> None:
        assert asking.move is not None
        passed, mask = list(ended.passed), self.alpha.mask
        states = {asking.move.begin(bits)}
        for effect in asking.move.effects:
            states = {y for x in states for y in self._ways(asking.move, effect, x)}
            if effect.name == "bring_back":
                return  # nobody looks at the facts after it, unless it fails
            if passed and passed[0][0] == effect.name:
                got = self.alpha(passed.pop(0)[1])
                among = {x for x in states if x & mask == got}
                if not among:
                    lack = " or ".join(sorted({self.difference(x & mask, got) for x in states}))
                    self._say(asking, f"after {effect.name}: {lack} ({choice})")
                    return
                states = among

    def _ways(self, move: RunMove, effect, x: int) -> Iterator[int]:
        if effect.work is not None and not effect.work(x):
            yield x
            return
        for y, _ in self.runner._forward(move, effect, x, None, lambda *_: None):
            yield y

    def difference(self, expected: int, got: int) -> str:
        names = [name for name, bit in self.alpha.bit.items() if (expected ^ got) & bit]
        return ", ".join(f"{name} is {'' if got & self.alpha.bit[name] else 'not '}so" for name in names)

    def _say(self, asking: Asking, text: str) -> None:
        self.disagreements.append(f"{asking.text}: {text}")

    # all states

    def explore(self, limit: int | None = None) -> None:
        """Breadth first from the state that an actor is attached in."""
        one = self.program.model.instance
        first = self.runner.first()
        self.pairs[first] = first_pair(one)
        assert self.alpha(self.pairs[first]) == first[1] & self.alpha.mask
        layer = [first]
        while layer and (limit is None or len(self.pairs) < limit):
            layer = [node for found in layer for node in self._expand(found)]

    def _expand(self, node: Node) -> Iterator[Node]:
        flat, bits = node
        for move in self.runner.moves[flat]:
            if move.move.environment and (move.guard is None or move.guard(bits)):
                end = next(iter(self.runner.ends(move, bits)))
                if end not in self.pairs:
                    self.pairs[end] = acted(move.move.event, self.pairs[node])
                    self._agree(move.move.event, end, self.alpha(self.pairs[end]))
                    yield end
        for asking in self.asked[self.runner.flats[flat]]:
            move = asking.move
            if move is not None and (move.guard is None or move.guard(bits)):
                yield from self._event(asking, move, node)

    def _agree(self, what: str, end: Node, got: int) -> None:
        if end[1] & self.alpha.mask != got:
            self.disagreements.append(f"{what}: {self.difference(end[1] & self.alpha.mask, got)}")

    def _event(self, asking: Asking, move: RunMove, node: Node) -> Iterator[Node]:
        bits, mask = node[1], self.alpha.mask
        pair = self.pairs[node]
        key = (asking.text, str(asking.row.target), id(move), bits & move.support)
        ends = list(self.runner.ends(move, bits))
        recipes = self._known.get(key)
        if recipes is None:
            found = self.outcomes(asking, pair, bits)
            expected = {(flat, x & mask) for flat, x in ends}
            for end in found.keys() - expected:
                self._unexpected(asking, end, expected, found[end])
            for end in expected - found.keys():
                self._unmatched(asking, end, found)
            frame = mask & move.support
            recipes = self._known[key] = {(flat, x & frame): how for (flat, x), how in found.items()}
        for end in ends:
            if end in self.pairs:
                continue
            how = recipes.get((end[0], end[1] & mask & move.support))
            if how is not None:
                ended = self.run(asking, pair, *how)
                if self.node(ended) == (end[0], end[1] & mask):
                    self.pairs[end] = ended.pair
                    yield end
                else:
                    self._say(asking, f"elsewhere: {self.difference(end[1] & mask, self.node(ended)[1])} ({how})")

    def _unexpected(self, asking: Asking, end: Node, expected: set[Node], how: object) -> None:
        flat = self.runner.flats[end[0]]
        near = min((self.difference(x, end[1]) for to, x in expected if to == end[0]), key=len, default="no such state")
        self._say(asking, f"the run time ends in {flat}, the checker does not: {near} {how}")

    def _unmatched(self, asking: Asking, end: Node, found: Mapping[Node, object]) -> None:
        flat = self.runner.flats[end[0]]
        near = min((self.difference(x, end[1]) for to, x in found if to == end[0]), key=len, default="no such state")
        self._say(asking, f"the checker ends in {flat}, the run time does not: {near}")


def _phases(action: str, first: bool) -> tuple[str, ...]:
    """The ways in which it can fail: before anything of it is noted, before it has done anything, half-way, after."""
    early = ("early" if first else "between",) if action in _DURING else ()
    inside = ("inside",) if action == "engine_send" else ()
    return (*early, "before", *inside, *(("after",) if action in _ACTING or action == "bring_back" else ()))
