"""A path through a machine, marked in its picture: steps numbered, the last in the warning colour, the rest faded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import evolve

from lifecycle.checker.trace import Step, Trace
from lifecycle.render.extract import FAULT, base_state
from lifecycle.render.model import Attempt, Diagram, Edge, Entry, Kind, Mark, plain_text
from states.spec import MachineSpec

_ORDER = (Mark.PLAIN, Mark.FADED, Mark.PATH, Mark.LAST)


def highlight(diagram: Diagram, spec: MachineSpec, trace: Trace) -> Diagram:
    """The picture with the trace's path. Raises ValueError where the trace is of another machine."""
    if trace.machine != spec.name:
        raise ValueError(f"the trace is of machine {trace.machine!r}, not {spec.name!r}")
    if not trace.steps:
        raise ValueError("the trace has no steps")
    ways = [(base_state(spec, step.source), base_state(spec, step.target)) for step in trace.steps]
    last = len(trace.steps)
    taken: dict[int, tuple[str, list[int]]] = {}  # row to its target and its steps
    attempts: dict[tuple[str, str], list[Attempt]] = {}
    for number, (step, way) in enumerate(zip(trace.steps, ways, strict=True), 1):
        entry = _row_of(diagram, step, way)
        if entry is not None:
            taken.setdefault(entry.row, (entry.target, []))[1].append(number)
        else:
            attempts.setdefault(_ends(way, step), []).append(Attempt(number, _said(step)))
    visited = {name for way in ways for name in way}
    edges = [_marked_edge(edge, taken, last) for whole in diagram.edges for edge in _apart(whole, taken)]
    final = ways[-1][1] if trace.steps[-1].outcome != "undone" else ways[-1][0]
    nodes = [
        evolve(
            node,
            mark=Mark.LAST if node.name == final else Mark.PATH if node.name in visited else Mark.FADED,
            inside=tuple(_marked(entry, taken, last) for entry in node.inside),
        )
        for node in diagram.nodes
    ]
    return evolve(
        diagram,
        nodes=tuple(nodes),
        edges=(*edges, *_tried(attempts, last)),
        subtitle=f"✗ {plain_text(trace.invariant)}" + (f": {plain_text(trace.why)}" if trace.why else ""),
    )


def _row_of(diagram: Diagram, step: Step, way: tuple[str, str]) -> Entry | None:
    """The row that the step took, or None where it took none."""
    if step.outcome in ("undone", FAULT):
        return None
    did = {effect.name for effect in step.effects}
    found = [
        entry
        for entry in diagram.entries()
        if (entry.event, entry.source, entry.target) == (plain_text(step.event), *way)
        and did <= {effect.name for effect in entry.effects}
        and _for_tag(entry, step.tag)
    ]
    return min(found, key=lambda entry: len(entry.effects), default=None)


def _for_tag(entry: Entry, tag: str | None) -> bool:
    if tag is None or entry.tag in ("", "same tag"):
        return True
    return (entry.tag == "actor") == (tag == "actor")


def _ends(way: tuple[str, str], step: Step) -> tuple[str, str]:
    return (way[0], way[0]) if step.outcome == "undone" else way


def _said(step: Step) -> str:
    tag = f"({step.tag})" if step.tag else ""
    ends = {"undone": " undone", FAULT: " failed"}
    return plain_text(f"{step.event}{tag}{ends.get(step.outcome, '')}")


def _tried(attempts: Mapping[tuple[str, str], Sequence[Attempt]], last: int) -> Iterator[Edge]:
    for (source, target), group in attempts.items():
        mark = Mark.LAST if any(one.step == last for one in group) else Mark.PATH
        broken = source == target or mark is Mark.LAST
        yield Edge(source, target, Kind.NORMAL, attempts=tuple(group), mark=mark, broken=broken)


def _apart(edge: Edge, taken: Mapping[int, tuple[str, list[int]]]) -> Iterator[Edge]:
    """Out of an edge from many states, the rows that the path took are edges of their own."""
    on_path = [entry for entry in edge.entries if entry.row in taken]
    if not edge.many or not on_path:
        yield edge
        return
    rest = tuple(entry for entry in edge.entries if entry.row not in taken)
    if rest:
        yield evolve(edge, entries=rest, many=tuple(entry.source for entry in rest))
    for entry in on_path:
        yield Edge(entry.source, entry.target, edge.kind, (entry,))


def _marked(entry: Entry, taken: Mapping[int, tuple[str, list[int]]], last: int) -> Entry:
    target, steps = taken.get(entry.row, ("", []))
    if target != entry.target:
        return evolve(entry, mark=Mark.FADED)
    return evolve(entry, steps=tuple(steps), mark=Mark.LAST if last in steps else Mark.PATH)


def _marked_edge(edge: Edge, taken: Mapping[int, tuple[str, list[int]]], last: int) -> Edge:
    entries = tuple(_marked(entry, taken, last) for entry in edge.entries)
    return evolve(edge, entries=entries, mark=_strongest(entry.mark for entry in entries))


def _strongest(marks: Iterable[Mark]) -> Mark:
    return max(marks, key=_ORDER.index)
