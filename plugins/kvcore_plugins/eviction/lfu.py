"""Least frequently used, with exponential decay."""

from __future__ import annotations

from functools import cache
from math import frexp, inf, ldexp, sqrt
from typing import Any, ClassVar, Literal, TypeAlias

from kvcore import InputError, ScoreEviction, Span
from kvcore.units import NS_PER_S

HALF_LIVES = {"s": 300.0, "accesses": 2000.0, "touches": 10.0}
"""The default of `half_life`, by unit."""


class LFU(ScoreEviction):
    """Evict the span with the lowest frequency; uses count less the older they are.

    A use weighs 1 when it happens, and its weight halves every `half_life`. All weights decay
    at one rate, so their order never changes by itself. A use at time t therefore adds the
    constant 2^(t / half_life) to the score of its span (forward decay), and no score is ever
    computed again.

    `span.data` is that sum, a `ScaledFloat`; with `touches` a float.

    Options:
        half_life: in the unit below; `inf`, plain LFU, gives all uses one weight.
        unit: `s`, seconds (the default); `accesses`, admissions to the cache, whichever spans
            they use; `touches`, the span's own uses, so that nothing decays while idle.
        decay: in place of `half_life`, the factor per access or touch, as in
            score = score · decay + 1. With 0.9 the score is 2.71 after three uses in a row;
            ten accesses later it is 0.94 (`accesses`, the default) or still 2.71 (`touches`).

    Source: Robinson and Devarakonda, "Data cache management using frequency-based
    replacement", SIGMETRICS 1990 (ageing); Lee et al., "LRFU", IEEE TC 2001 (exponential).
    """

    name: ClassVar[str] = "lfu"

    def __init__(
        self,
        half_life: float | None = None,
        unit: Literal["s", "accesses", "touches"] | None = None,
        decay: float | None = None,
    ) -> None:
        """Store the options; the default of one may depend on another."""
        if unit is None:
            unit = "s" if decay is None else "accesses"
        elif unit not in HALF_LIVES:
            msg = f"lfu: unit={unit!r} is not known; there are: {', '.join(HALF_LIVES)}"
            raise InputError(msg)
        if decay is not None:
            if half_life is not None or unit == "s":
                msg = (
                    "lfu: decay is a factor per access or touch, in place of half_life: give "
                    "it with unit=accesses or unit=touches, and without half_life"
                )
                raise InputError(msg)
            if not 0 < decay <= 1:
                msg = f"lfu: decay={decay} must be above 0 and at most 1"
                raise InputError(msg)
        elif half_life is None:
            half_life = HALF_LIVES[unit]
        elif not half_life > 0:
            msg = f"lfu: half_life={half_life} must be above 0 (inf: no decay)"
            raise InputError(msg)
        self.half_life = half_life
        self.unit = unit
        self.decay = decay
        self._decays = not (half_life == inf or decay == 1)
        if self._decays and half_life is not None:
            numerator, denominator = half_life.as_integer_ratio()
            if unit == "s":
                numerator *= NS_PER_S
            self._half_life = numerator, denominator  # of ns, accesses or touches

    def on_insert(self, span: Span, now: int) -> None:
        """Store the weight of the first use."""
        span.data = self._use(span, now)

    def on_access(self, span: Span, now: int) -> None:
        """Add the weight of a use."""
        if not self._decays:
            return
        if self.unit == "touches":
            span.data = span.data * self._decay_of_a_touch() + 1
        else:
            span.data = add(span.data, self._use(span, now))

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy the weight to the upper half."""
        upper.data = lower.data

    def score(self, span: Span, now: int) -> Any:
        """Return the sum of the weights of its uses, which never changes by itself."""
        if not self._decays:
            return span.hit_count
        if self.unit == "touches":
            return span.data
        return sort_key(span.data)

    def frequency(self, span: Span, *, now: int = 0, accesses: int = 0) -> float:
        """Return the frequency of `span` at `now` ns, or after `accesses` admissions."""
        if not self._decays:
            return span.hit_count + 1.0
        if self.unit == "touches":
            return float(span.data)
        return divide(span.data, self._weight(now if self.unit == "s" else accesses))

    def _use(self, span: Span, now: int) -> Any:
        """Return the weight of a use of `span` now; None if it is not stored: none decays."""
        if not self._decays:
            return None
        if self.unit == "touches":
            return 1.0
        return self._weight(now if self.unit == "s" else span.last_hit_order)

    def _weight(self, moment: int) -> ScaledFloat:
        """Return the weight of a use at `moment` (ns or admissions); half-lives double it."""
        if self.decay is not None:
            return power(1 / self.decay, moment)
        numerator, denominator = self._half_life
        return exp2(moment * denominator, numerator)

    def _decay_of_a_touch(self) -> float:
        """Return the factor by which a use lessens the weight of those before it."""
        if self.decay is not None:
            return self.decay
        numerator, denominator = self._half_life
        return divide(ONE, exp2(denominator, numerator))


# Weights exceed the range of a float after 1024 half-lives, and must be the same on every
# machine. So a weight is a pair, computed with correctly rounded operations only (+, *, sqrt,
# ldexp): the last bits of pow() and exp() differ between machines.

ScaledFloat: TypeAlias = tuple[int, float]
"""(exponent, mantissa): mantissa · 2^exponent, with the mantissa in [1, 2)."""

ONE: ScaledFloat = (0, 1.0)

TABLE_BITS = 10
TABLE_MASK = (1 << TABLE_BITS) - 1
TABLES = 3
FRACTION_BITS = TABLE_BITS * TABLES
"""Bits of the fraction of an exponent that `exp2` looks up, `TABLE_BITS` in each table."""

MAX_SHIFT = 60
"""Halvings after which a summand is too small to count."""

ORDER_BITS = 40
"""Bits of a mantissa that `sort_key` compares."""


@cache
def _tables() -> tuple[tuple[float, ...], ...]:
    """Return for n = 1 to `TABLES` 2^(i / 2^(TABLE_BITS · n)), for i below 2^TABLE_BITS."""
    roots = []
    root = 2.0
    for _ in range(FRACTION_BITS):
        root = sqrt(root)
        roots.append(root)
    tables = []
    for index in range(TABLES):
        powers = [1.0]
        for factor in reversed(roots[index * TABLE_BITS : (index + 1) * TABLE_BITS]):
            powers += [value * factor for value in powers]  # for the next bit of i
        tables.append(tuple(powers))
    return tuple(tables)


def exp2(numerator: int, denominator: int) -> ScaledFloat:
    """Return 2^(numerator / denominator), the fraction to 30 bits. O(1)."""
    exponent, rest = divmod(numerator, denominator)
    fraction = (rest << FRACTION_BITS) // denominator
    first, second, third = _tables()
    mantissa = (
        first[fraction >> 2 * TABLE_BITS]
        * second[(fraction >> TABLE_BITS) & TABLE_MASK]
        * third[fraction & TABLE_MASK]
    )
    return normalize(exponent, mantissa)


def power(base: float, exponent: int) -> ScaledFloat:
    """Return base^exponent, by squaring. O(log exponent)."""
    result = ONE
    square = normalize(0, base)
    while exponent:
        if exponent & 1:
            result = multiply(result, square)
        square = multiply(square, square)
        exponent >>= 1
    return result


def add(one: ScaledFloat, other: ScaledFloat) -> ScaledFloat:
    """Return the sum of two numbers."""
    if one < other:
        one, other = other, one
    shift = one[0] - other[0]
    if shift > MAX_SHIFT:
        return one
    return normalize(one[0], one[1] + ldexp(other[1], -shift))


def multiply(one: ScaledFloat, other: ScaledFloat) -> ScaledFloat:
    """Return the product of two numbers."""
    return normalize(one[0] + other[0], one[1] * other[1])


def divide(one: ScaledFloat, other: ScaledFloat) -> float:
    """Return the quotient of two numbers as a float, limited to 2^±1000."""
    return ldexp(one[1] / other[1], max(-1000, min(1000, one[0] - other[0])))


def sort_key(number: ScaledFloat) -> int:
    """Return an integer that orders numbers; those that agree to 40 bits are equal."""
    exponent, mantissa = number
    return (exponent << ORDER_BITS) + round(ldexp(mantissa - 1, ORDER_BITS))


def normalize(exponent: int, mantissa: float) -> ScaledFloat:
    """Return mantissa · 2^exponent with the mantissa in [1, 2)."""
    fraction, shift = frexp(mantissa)
    return exponent + shift - 1, fraction * 2
