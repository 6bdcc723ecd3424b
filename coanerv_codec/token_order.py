"""In which order coder 2 codes the tokens of a channel, and which neighbours in the grid are known by then.

The tokens of a cell stand in rows. Usual channels take two passes over a chessboard, so that half of the tokens know their
four neighbours. Smooth channels take five, each of which halves the distance to what is known, or turns it by 45 degrees:

    1 5 3 5 1      pass 1 knows nothing, 2 the four tokens two steps off on the diagonals, 3 those two steps off along
    5 4 5 4 5      row and column, 4 the next on the diagonals, 5 the next along row and column
    3 5 2 5 3
    5 4 5 4 5
    1 5 3 5 1
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

DIAGONAL, STRAIGHT = ((-1, -1), (-1, 1), (1, -1), (1, 1)), ((-1, 0), (1, 0), (0, -1), (0, 1))


class Pass(NamedTuple):
    """Tokens [n] that are coded together, and for each its k neighbours that are known: [k, n], T where there is none."""

    tokens: np.ndarray
    neighbours: np.ndarray
    known: np.ndarray  # how many there are [n]


@lru_cache(maxsize=2)
def passes(cells: int, tokens: int, row: int) -> tuple[list[Pass], list[Pass]]:
    """The order in which the tokens of a channel are coded: the passes of usual channels, and those of smooth ones."""
    if not row:
        every = [Pass(np.arange(cells * tokens), np.zeros((0, cells * tokens), np.int64), np.zeros(1, np.int64))]
        return every, every
    y, x = np.divmod(np.arange(tokens), row)
    odd = (x + y) % 2 == 1
    even = (x % 2 == 0) & (y % 2 == 0)
    corner, middle = (x % 4 == 0) & (y % 4 == 0), (x % 4 == 2) & (y % 4 == 2)
    board = ((~odd, 0, ()), (odd, 1, STRAIGHT))
    lattice = (
        (corner, 0, ()),
        (middle, 2, DIAGONAL),
        (even & ~corner & ~middle, 2, STRAIGHT),
        (~odd & ~even, 1, DIAGONAL),
        (odd, 1, STRAIGHT),
    )
    return tuple(
        [_make_pass(cells, tokens, row, *part) for part in order if part[0].any()] for order in (board, lattice)
    )


def _make_pass(
    cells: int, tokens: int, row: int, chosen: np.ndarray, distance: int, directions: tuple[tuple[int, int], ...]
) -> Pass:
    """The chosen tokens [N] of every cell, and their neighbours so far away in some directions (rows, columns)."""
    inside = np.flatnonzero(chosen)
    y, x = np.divmod(inside, row)
    first = tokens * np.arange(cells)[:, None]
    neighbours, known = [], np.zeros(len(inside), np.int64)
    for down, right in directions:
        there_y, there_x = y + distance * down, x + distance * right
        there = (there_y >= 0) & (there_y < tokens // row) & (there_x >= 0) & (there_x < row)
        neighbours.append(np.where(there, first + there_y * row + there_x, cells * tokens).ravel())
        known += there
    count = cells * len(inside)
    return Pass((first + inside).ravel(), np.array(neighbours, np.int64).reshape(-1, count), np.tile(known, cells))


def predict(values: np.ndarray, part: Pass) -> np.ndarray:
    """The mean of the known neighbours of a pass, halves rounded up: values [..., T + 1], the last 0, to [..., n]."""
    if not len(part.neighbours):
        return np.zeros((*values.shape[:-1], len(part.tokens)), np.int64)
    total = values[..., part.neighbours].sum(axis=-2)
    return (2 * total + part.known) // np.maximum(2 * part.known, 1)
