"""Numbers too large for a float, added and compared alike on every machine.

A weight is (exponent, mantissa) with the mantissa in [1, 2), standing for
mantissa · 2^exponent. Only correctly rounded operations are used (+, *, sqrt, ldexp), no
pow or exp, whose last bits differ between machines.
"""

from __future__ import annotations

from functools import cache
from math import frexp, ldexp, sqrt
from typing import TypeAlias

Weight: TypeAlias = tuple[int, float]


ONE: Weight = (0, 1.0)


BITS = 10


STEPS = 3


FRACTION = BITS * STEPS


PRECISION = 60


ORDER = 40


@cache
def _tables() -> tuple[tuple[float, ...], ...]:
    """Return 2^(i / 2^(BITS · step)) for i below 2^BITS and each step."""
    roots = []
    root = 2.0
    for _ in range(FRACTION):
        root = sqrt(root)
        roots.append(root)
    tables = []
    for step in range(STEPS):
        row = [1.0]
        for bit in reversed(roots[step * BITS : (step + 1) * BITS]):
            row += [value * bit for value in row]
        tables.append(tuple(row))
    return tuple(tables)


def exp2(numerator: int, denominator: int) -> Weight:
    """Return 2^(numerator / denominator), the fraction to 30 bits. O(1)."""
    exponent, rest = divmod(numerator, denominator)
    fraction = (rest << FRACTION) // denominator
    mask = (1 << BITS) - 1
    mantissa = 1.0
    for step, table in enumerate(_tables()):
        mantissa *= table[(fraction >> BITS * (STEPS - 1 - step)) & mask]
    return normal(exponent, mantissa)


def power(base: float, exponent: int) -> Weight:
    """Return base^exponent, by squaring. O(log exponent)."""
    result = ONE
    square = normal(0, base)
    while exponent:
        if exponent & 1:
            result = times(result, square)
        square = times(square, square)
        exponent >>= 1
    return result


def plus(one: Weight, other: Weight) -> Weight:
    """Return the sum of two weights."""
    if one < other:
        one, other = other, one
    shift = one[0] - other[0]
    if shift > PRECISION:
        return one
    return normal(one[0], one[1] + ldexp(other[1], -shift))


def times(one: Weight, other: Weight) -> Weight:
    """Return the product of two weights."""
    return normal(one[0] + other[0], one[1] * other[1])


def over(one: Weight, other: Weight) -> float:
    """Return the quotient of two weights as a float."""
    return ldexp(one[1] / other[1], max(-1000, min(1000, one[0] - other[0])))


def order(weight: Weight) -> int:
    """Return an integer that orders weights, those equal to 40 bits alike."""
    exponent, mantissa = weight
    return (exponent << ORDER) + round(ldexp(mantissa - 1, ORDER))


def normal(exponent: int, mantissa: float) -> Weight:
    """Return the weight with its mantissa in [1, 2)."""
    fraction, shift = frexp(mantissa)
    return exponent + shift - 1, fraction * 2
