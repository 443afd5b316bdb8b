"""Least squares with coefficients that are not below zero, for a handful of columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

__all__ = ["nonnegative"]

# A pivot below this, in columns of length one, is a column that those before it make up.
_LEAST_PIVOT = 1e-11
# A gradient below this leaves nothing to gain.
_LEAST_GAIN = 1e-13
# Columns come in or go so often for each before that is left as it is: rounding may make them take turns.
_MOST_TURNS = 10


def nonnegative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimises |A x - b|, for the rows of A.

    A column that others make up, or that is all zeros, gets 0. Source: Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23, on normal equations of columns scaled to length one.
    """
    columns = list(zip(*rows, strict=True))
    lengths = [sqrt(sum(value * value for value in column)) or 1.0 for column in columns]
    scaled = [[value / length for value in column] for column, length in zip(columns, lengths, strict=True)]
    gram = [[_dot(one, other) for other in scaled] for one in scaled]
    moments = [_dot(column, targets) for column in scaled]
    chosen = _active_set(gram, moments)
    return [value / length for value, length in zip(chosen, lengths, strict=True)]


def _active_set(gram: list[list[float]], moments: list[float]) -> list[float]:
    size = len(moments)
    x, passive, refused = [0.0] * size, list[int](), set[int]()
    least_gain = _LEAST_GAIN * max(map(abs, moments), default=0.0)
    for _ in range(_MOST_TURNS * size):
        gains = [moments[i] - _dot(gram[i], x) for i in range(size)]
        able = [i for i in range(size) if i not in passive and i not in refused and gains[i] > least_gain]
        if not able:
            return x
        best = max(able, key=gains.__getitem__)
        solved = _solved(gram, moments, [*passive, best])
        if solved is None or solved[best] <= 0:
            refused.add(best)  # made up of the others, or a gain that is rounding alone
            continue
        passive.append(best)
        x, passive = _feasible(gram, moments, x, passive, solved)
    return x


def _feasible(
    gram: list[list[float]],
    moments: list[float],
    x: list[float],
    passive: list[int],
    solved: dict[int, float],
) -> tuple[list[float], list[int]]:
    """Go from x towards the solution as far as nothing falls below zero; drop what gets there, and repeat."""
    while negative := [i for i, value in solved.items() if value <= 0]:
        shares = {i: x[i] / (x[i] - solved[i]) if x[i] > 0 else 0.0 for i in negative}
        first = min(negative, key=shares.__getitem__)
        x = [old + shares[first] * (solved.get(i, old) - old) for i, old in enumerate(x)]
        passive = [i for i in passive if i != first]
        again = _solved(gram, moments, passive)
        assert again is not None, "fewer columns are no less independent"
        solved = again
    return [solved.get(i, 0.0) for i in range(len(x))], passive


def _solved(gram: list[list[float]], moments: list[float], columns: Sequence[int]) -> dict[int, float] | None:
    """Solve the normal equations of some columns by elimination; `None` if one is made up of the others."""
    system = [[*(gram[i][j] for j in columns), moments[i]] for i in columns]
    size = len(system)
    for at in range(size):
        if system[at][at] < _LEAST_PIVOT:
            return None
        for below in range(at + 1, size):
            factor = system[below][at] / system[at][at]
            for place in range(at, size + 1):
                system[below][place] -= factor * system[at][place]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = _dot(system[at][at + 1 : size], found[at + 1 :])
        found[at] = (system[at][size] - known) / system[at][at]
    return dict(zip(columns, found, strict=True))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
