"""Exploring less and missing nothing: names that do not matter, and facts by which nothing decides.

[Note: soundness of the reduction] The table treats all tags but 'actor' alike: rows match the actor or any other tag,
effects name no other tag, and no guard does. So renaming those tags maps each move of the machine to a move, and each
invariant to itself; likewise for engines. What is reachable from a state is then reachable, renamed, from the renamed
state, and one state may stand for all its renamings (C. N. Ip and D. L. Dill, Better verification through symmetry,
1996, https://doi.org/10.1007/BF00625968). ``symmetry`` checks the premise: it renames every grounded move and looks for
it among the moves, and raises ValueError where a declaration treats tags differently, for instance by name.

[Note: order] An effect asks the engines one after the other, so that it may stop with the first asked and the second
not, and never the other way round. Renaming engines does not keep that, so a state that stands for others is explored
under every naming of the engines (``engine_renamings``). Nothing else has an order that tags or engines take part in.

[Note: labels] Whether a tag's version is the published one, or the one that an engine has, is written by effects and
read by no guard, no effect and no invariant of ours. Leaving such facts out maps every move to a move and keeps all
others, so the states without labels are exactly those with them, labels struck out. ``without_labels`` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any

from attrs import evolve, frozen

from lifecycle.checker.explore import Canonical
from lifecycle.checker.formula import And, Bit, Const, Expr, Not
from lifecycle.checker.ground import GroundEffect, Model, Move, Program
from lifecycle.checker.runner import Node
from lifecycle.checker.steps import Micro

_CHUNK = 11  # bits that one table of a renaming covers


@frozen
class Renaming:
    """A permutation of tags and engines, as tables over chunks of bits."""

    flats: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]

    def __call__(self, node: Node) -> Node:
        flat, bits = node
        renamed, shift = 0, 0
        for table in self.tables:
            renamed |= table[bits >> shift & ((1 << _CHUNK) - 1)]
            shift += _CHUNK
        return self.flats[flat], renamed


def without_labels(model: Model) -> Model:
    """See [Note: labels]."""
    return evolve(model, instance=evolve(model.instance, labels=()))


def symmetry(program: Program) -> Canonical:
    """The function from a state to the one that stands for it: the least of its renamings, by flat state and bits."""
    instance = program.model.instance
    free = [tag for tag in instance.tags if tag not in instance.labels]
    names = [
        dict(zip((*free, *instance.engines), (*tags, *engines), strict=True))
        for tags in permutations(free)
        for engines in permutations(instance.engines)
    ]
    _require_symmetric(program, _generators(free, instance.engines))
    _require_symmetric_facts(program, _generators(free, instance.engines))
    renamings = [_renaming(program, name) for name in names if any(old != new for old, new in name.items())]
    known: dict[Node, Node] = {}

    def canonical(node: Node) -> Node:
        found = known.get(node)
        if found is None:
            found = node
            for renaming in renamings:
                other = renaming(node)
                if other < found:
                    found = other
            known[node] = found
        return found

    return canonical


def engine_renamings(program: Program) -> Callable[[Node], Iterable[Node]]:
    """The state under every naming of the engines. See [Note: order]."""
    engines = program.model.instance.engines
    names = [dict(zip(engines, order, strict=True)) for order in permutations(engines)]
    renamings = [_renaming(program, name) for name in names]
    return lambda node: dict.fromkeys(renaming(node) for renaming in renamings)


def _require_symmetric_facts(program: Program, generators: Iterable[Mapping[str, str]]) -> None:
    """Contracts and invariants must not tell tags or engines apart either."""
    asked = program.contracts
    for names in generators:
        renamed, plain = _told(program, names), _told(program, {})
        for flat, expr in asked.items():
            if renamed(expr) != plain(asked[_renamed_flat(flat, names, program)]):
                raise ValueError(f"the contract of {flat} does not treat {' and '.join(names)} alike")
        for one in program.model.invariants:
            formula = one.formula(program.words)
            others = [plain(other.formula(program.words)) for other in program.model.invariants]
            if renamed(formula) not in others:
                raise ValueError(f"invariant {one.name} does not treat {' and '.join(names)} alike")


def _generators(tags: Sequence[str], engines: Sequence[str]) -> Iterator[dict[str, str]]:
    """Exchanges of neighbours, from which all renamings are made."""
    for names in (tags, engines):
        for one, other in pairwise(names):
            yield {one: other, other: one}


def renamed_bit(name: str, names: Mapping[str, str], program: Program) -> str:
    parts = [names.get(part, part) for part in name.split(".")]
    if parts[0] == "same":
        order = program.model.instance.references.index
        parts[1:3] = sorted(parts[1:3], key=order)
    return ".".join(parts)


def _renamed_flat(flat: str, names: Mapping[str, str], program: Program) -> str:
    state = program.table.states[flat]
    if state.tag is not None:
        return f"{state.name}_{names.get(state.tag, state.tag)}"
    return flat if state.origin is None else f"{state.name}_{_renamed_flat(state.origin, names, program)}"


def _renaming(program: Program, names: Mapping[str, str]) -> Renaming:
    index = {name: n for n, name in enumerate(program.bits)}
    flats = {flat: n for n, flat in enumerate(program.table.states)}
    moved = [1 << index[renamed_bit(name, names, program)] for name in program.bits]
    tables = []
    for start in range(0, len(moved), _CHUNK):
        table = [0]
        for bit in moved[start : start + _CHUNK]:
            table += [value | bit for value in table]
        tables.append(tuple(table))
    return Renaming(tuple(flats[_renamed_flat(flat, names, program)] for flat in flats), tuple(tables))


def _require_symmetric(program: Program, generators: Iterable[Mapping[str, str]]) -> None:
    for names in generators:
        key = _keyed(program, names)
        if sorted(map(key, program.moves)) != sorted(map(_keyed(program, {}), program.moves)):
            swapped = " and ".join(names)
            raise ValueError(f"the machine does not treat {swapped} alike, so states can not be reduced by symmetry")


def _told(program: Program, names: Mapping[str, str]) -> Callable[[Expr], str]:
    """A formula as text under the renaming, in which the order of its parts does not matter."""

    def expr(one: Expr) -> str:
        if isinstance(one, Bit):
            return renamed_bit(one.name, names, program)
        if isinstance(one, Const):
            return str(one.value)
        if isinstance(one, Not):
            return f"!{expr(one.inner)}"
        parts = sorted(map(expr, one.parts))  # type: ignore[attr-defined]
        return f"({' & '.join(parts)})" if isinstance(one, And) else f"({' | '.join(parts)})"

    return expr


def _keyed(program: Program, names: Mapping[str, str]) -> Callable[[Move], str]:
    """A text of the move under the renaming, in which the order of parts of formulas does not matter."""

    expr = _told(program, names)

    def sets(pairs: Iterable[tuple[str, Expr]]) -> str:
        return ";".join(sorted(f"{renamed_bit(name, names, program)}={expr(value)}" for name, value in pairs))

    def micro(one: Micro) -> tuple[Any, ...]:
        ways = sorted((expr(way.when), sets(way.sets)) for way in one.ways)
        return expr(one.when), expr(one.succeeds), expr(one.sound), one.breaks, one.real, ways

    def effect(one: GroundEffect | None) -> Any:
        # micro-steps over engines come in the order of declaration, which no renaming keeps: see [Note: order]
        if one is None:
            return None
        micros = sorted(map(micro, one.micros))
        return one.name, one.undoable, expr(one.needs), expr(one.gives), micros, effect(one.inverse)

    def key(move: Move) -> str:
        effects = [effect(one) for one in move.effects]
        flats = [_renamed_flat(flat, names, program) for flat in (move.source, move.target)]
        tag = names.get(move.tag or "", move.tag)
        event = " ".join(names.get(word, word) for word in move.event.split())
        return str((event, tag, flats, expr(move.guard), sets(move.sets), effects))

    return key
