"""Boolean formulas over named bits: values that are read, compiled to Python, and exported to other languages.

A state of the checker is one integer whose bits are the named facts. Formulas are simplified as they are built, so that
what does not depend on any bit is ``TRUE`` or ``FALSE``; so is a conjunction, or a disjunction, of a part and its
negation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import frozen


class Expr:
    """A formula. ``&``, ``|`` and ``~`` build larger ones."""

    __slots__ = ()

    def __and__(self, other: Expr) -> Expr:
        return all_of((self, other))

    def __or__(self, other: Expr) -> Expr:
        return any_of((self, other))

    def __invert__(self) -> Expr:
        if isinstance(self, Const):
            return FALSE if self.value else TRUE
        return self.inner if isinstance(self, Not) else Not(self)


@frozen
class Const(Expr):
    value: bool


@frozen
class Bit(Expr):
    name: str


@frozen
class Not(Expr):
    inner: Expr


@frozen
class And(Expr):
    parts: tuple[Expr, ...]


@frozen
class Or(Expr):
    parts: tuple[Expr, ...]


TRUE = Const(True)
FALSE = Const(False)


def _contrary(parts: Mapping[Expr, None]) -> bool:
    """Some part is there with its negation."""
    return any(isinstance(part, Not) and part.inner in parts for part in parts)


def all_of(parts: Iterable[Expr]) -> Expr:
    found: dict[Expr, None] = {}
    for part in parts:
        if part == FALSE:
            return FALSE
        if part != TRUE:
            found.update(dict.fromkeys(part.parts if isinstance(part, And) else (part,)))
    if any(part.inner in found for part in found if isinstance(part, Not)):
        return FALSE
    if _contrary(found):  # the masked comparison of ``source`` could not say it
        return FALSE
    return TRUE if not found else next(iter(found)) if len(found) == 1 else And(tuple(found))


def any_of(parts: Iterable[Expr]) -> Expr:
    found: dict[Expr, None] = {}
    for part in parts:
        if part == TRUE:
            return TRUE
        if part != FALSE:
            found.update(dict.fromkeys(part.parts if isinstance(part, Or) else (part,)))
    if any(part.inner in found for part in found if isinstance(part, Not)):
        return TRUE
    if _contrary(found):
        return TRUE
    return FALSE if not found else next(iter(found)) if len(found) == 1 else Or(tuple(found))


def bits_of(expr: Expr) -> frozenset[str]:
    """Names of the bits that the formula reads."""
    if isinstance(expr, Bit):
        return frozenset([expr.name])
    if isinstance(expr, Not):
        return bits_of(expr.inner)
    if isinstance(expr, And | Or):
        return frozenset().union(*map(bits_of, expr.parts))
    return frozenset()


def told(expr: Expr, name: Callable[[str], str]) -> str:
    """The formula in words; ``name`` says what a bit is called."""
    if isinstance(expr, Const):
        return "always" if expr.value else "never"
    if isinstance(expr, Bit):
        return name(expr.name)
    if isinstance(expr, Not):
        return f"not ({told(expr.inner, name)})"
    assert isinstance(expr, And | Or)
    return (" and " if isinstance(expr, And) else " or ").join(f"({told(part, name)})" for part in expr.parts)


Index = Mapping[str, int]


def source(expr: Expr, index: Index) -> str:
    """Python source of the formula over the integer ``x``; literals of a conjunction become one masked comparison."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Bit):
        return f"x & {1 << index[expr.name]}"
    if isinstance(expr, Not):
        return f"not ({source(expr.inner, index)})"
    assert isinstance(expr, And | Or)
    if isinstance(expr, Or):
        plain = [part.name for part in expr.parts if isinstance(part, Bit)]
        texts = [f"x & {sum(1 << index[name] for name in plain)}"] if plain else []
        texts += [f"({source(part, index)})" for part in expr.parts if not isinstance(part, Bit)]
        return " or ".join(texts)
    return " and ".join(_conjunction(expr, index))


def _conjunction(expr: And, index: Index) -> list[str]:
    mask = value = 0
    rest = []
    for part in expr.parts:
        literal = part.inner if isinstance(part, Not) else part
        if isinstance(literal, Bit):
            mask |= 1 << index[literal.name]
            value |= (1 << index[literal.name]) if part is literal else 0
        else:
            rest.append(f"({source(part, index)})")
    return [*([f"x & {mask} == {value}"] if mask else []), *rest]


def compiled(expr: Expr, index: Index) -> Callable[[int], object]:
    """The formula as a function of the state; its result is true or false, but not always a bool."""
    return eval(f"lambda x: {source(expr, index)}")  # type: ignore[no-any-return]  # own text, of own names alone


Assignment = tuple[str, Expr]


def assigned(assignments: Iterable[Assignment], index: Index) -> Callable[[int], int]:
    """All assignments at once, each computed from the state before."""
    clear = put = 0
    texts = []
    for name, value in dict(assignments).items():
        bit = 1 << index[name]
        clear |= bit
        if isinstance(value, Const):
            put |= bit if value.value else 0
        else:
            texts.append(_moved(value, index, index[name]))
    text = " | ".join([f"x & ~{clear} | {put}" if put else f"x & ~{clear}", *texts])
    return eval(f"lambda x: {text}")  # type: ignore[no-any-return]


def _moved(value: Expr, index: Index, to: int) -> str:
    if isinstance(value, Bit):
        return f"(x >> {index[value.name]} & 1) << {to}"
    return f"({1 << to} if {source(value, index)} else 0)"
