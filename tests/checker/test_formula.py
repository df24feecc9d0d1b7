"""Formulas: what is compiled is what is written, and simplifying changes no meaning."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.checker.formula import (
    FALSE,
    TRUE,
    And,
    Bit,
    Const,
    Expr,
    Not,
    Or,
    all_of,
    any_of,
    assigned,
    bits_of,
    compiled,
)

NAMES = ("a", "b", "c", "d")
INDEX = {name: 2 * n + 1 for n, name in enumerate(NAMES)}  # with gaps: other bits are nobody's business
STATES = [
    sum(1 << INDEX[name] for name, value in zip(NAMES, row, strict=True) if value) for row in product((0, 1), repeat=4)
]
NOISE = 0b01010101  # bits that no name has

#: As they may be written down, not simplified.
raw = st.recursive(
    st.sampled_from([TRUE, FALSE, *map(Bit, NAMES)]),
    lambda inner: st.one_of(
        inner.map(Not), st.lists(inner, max_size=4).map(tuple).map(And), st.lists(inner, max_size=4).map(tuple).map(Or)
    ),
    max_leaves=12,
)


def value(expr: Expr, state: int) -> bool:
    """What the formula says of the state, straight from its definition."""
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Bit):
        return bool(state >> INDEX[expr.name] & 1)
    if isinstance(expr, Not):
        return not value(expr.inner, state)
    assert isinstance(expr, And | Or)
    return (all if isinstance(expr, And) else any)(value(part, state) for part in expr.parts)


def simplified(expr: Expr) -> Expr:
    """The same, built by the operations that simplify."""
    if isinstance(expr, Not):
        return ~simplified(expr.inner)
    if isinstance(expr, And | Or):
        return (all_of if isinstance(expr, And) else any_of)(map(simplified, expr.parts))
    return expr


@given(raw)
def test_simplifying_keeps_the_meaning(expr):
    small = simplified(expr)
    assert [value(small, state) for state in STATES] == [value(expr, state) for state in STATES]
    assert bits_of(small) <= bits_of(expr)


@given(raw)
def test_compiled_formulas_say_what_is_written(expr):
    small = simplified(expr)
    test = compiled(small, INDEX)
    assert [bool(test(state | NOISE)) for state in STATES] == [value(small, state) for state in STATES]


@given(raw)
def test_what_depends_on_no_bit_is_a_constant(expr):
    small = simplified(expr)
    assert isinstance(small, Const) or bits_of(small)


@given(st.lists(st.tuples(st.sampled_from(NAMES), raw.map(simplified)), max_size=5))
def test_assignments_are_simultaneous_and_the_last_one_wins(assignments):
    change = assigned(assignments, INDEX)
    for state in STATES:
        expected = state
        for name, expr in dict(assignments).items():
            expected &= ~(1 << INDEX[name])
            expected |= value(expr, state) << INDEX[name]
        assert change(state | NOISE) == expected | NOISE


def test_bits_are_exchanged_without_a_third():
    change = assigned([("a", Bit("b")), ("b", Bit("a"))], INDEX)
    a, b = 1 << INDEX["a"], 1 << INDEX["b"]
    assert change(a) == b
    assert change(b) == a


def test_a_part_and_its_negation_are_a_constant():
    a, b = Bit("a"), Bit("b")
    assert all_of([a, b, ~a]) == FALSE
    assert any_of([~(a & b), b, a & b]) == TRUE
