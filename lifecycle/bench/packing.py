"""Which tensors of a model are cut from one piece of memory: each by itself, by layer, all, or up to so many MiB."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

from attrs import frozen

from lifecycle.memory.moves import BLOCK

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
KINDS = ("tensor", "layer", "model")
LEAST = 32  # MiB: torch takes 20 MiB at once for what is small, which a piece should be larger than
_MIB = 1 << 20
_ITEMSIZE = 2  # bfloat16

Shapes = Mapping[str, tuple[int, ...]]


@frozen
class Piece:
    """Tensors, by name, that are allocated one after the other, and the bytes to reserve for them ahead of that."""

    names: tuple[str, ...]
    reserve: int


@frozen
class Memory:
    """Where tensors are allocated. ``region(reserve)`` is entered for each piece, with the bytes to reserve.

    One after the other, and not all pieces first: torch takes the smallest free block that a tensor fits in, and would
    put small tensors where large ones were to go.
    """

    pieces: str = "tensor"
    region: Callable[[int], AbstractContextManager[object]] = nullcontext


def in_layer(name: str) -> tuple[int, str] | None:
    """The number of the layer that a tensor is in, and its name there; None for one outside the layers."""
    found = _LAYER.search(name)
    return (int(found[1]), found[2]) if found else None


def require_pieces(pieces: str) -> None:
    """Raises ValueError for what is neither one of ``KINDS`` nor a whole number of MiB from ``LEAST`` on."""
    if pieces not in KINDS and not (pieces.isdecimal() and int(pieces) >= LEAST):
        raise ValueError(f"pieces={pieces}: known are {', '.join(KINDS)}, and MiB from {LEAST} on, like 64")


def cut(pieces: str, shapes: Shapes) -> tuple[Piece, ...]:
    """All tensors, in their order. Nothing is reserved where torch takes memory per tensor.

    Pieces of a size are filled with whole tensors as far as they go; a tensor that is larger has one of its own. Raises
    as ``require_pieces`` does.
    """
    require_pieces(pieces)
    if pieces == "tensor":
        return (Piece(tuple(shapes), 0),)
    if pieces == "model":
        return (_piece(tuple(shapes), shapes),)
    groups = _layers(shapes) if pieces == "layer" else _filled(shapes, int(pieces) * _MIB)
    return tuple(_piece(names, shapes) for names in groups)


def _layers(shapes: Shapes) -> Iterator[tuple[str, ...]]:
    """What is in no layer is by itself."""
    for _, names in groupby(shapes, _owner):
        yield tuple(names)


def _owner(name: str) -> str:
    layer = in_layer(name)
    return str(layer[0]) if layer else name


def _filled(shapes: Shapes, size: int) -> Iterator[tuple[str, ...]]:
    names: tuple[str, ...] = ()
    room = size
    for name, shape in shapes.items():
        nbytes = _cut_from_a_piece(shape)
        if names and nbytes > max(room, 0):
            yield names
            names, room = (), size
        names, room = (*names, name), room - nbytes
    yield names


def _piece(names: tuple[str, ...], shapes: Shapes) -> Piece:
    return Piece(names, sum(_cut_from_a_piece(shapes[name]) for name in names))


def _cut_from_a_piece(shape: tuple[int, ...]) -> int:
    """In whole blocks, as torch cuts; nothing up to 1 MiB, for which it has memory of its own."""
    nbytes = -(-_ITEMSIZE * math.prod(shape) // BLOCK) * BLOCK
    return nbytes if nbytes > _MIB else 0
