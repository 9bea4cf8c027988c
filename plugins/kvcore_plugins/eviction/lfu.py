"""Least frequently used, with exponential decay."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar, Literal

import attrs

from kvcore import InputError, ScoreEviction, Span
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.scaled_float import ONE, Weight, exp2, order, over, plus, power

UNITS = ("s", "accesses", "touches")
DEFAULT_HALF_LIFE = {"s": 300.0, "accesses": 2000.0, "touches": 10.0}


@attrs.define(slots=False, eq=False)
class LFU(ScoreEviction):
    """Evict the span with the lowest frequency; uses count less the older they are.

    A use weighs 1 when it happens and halves every `half_life`. All weights fade alike,
    so their order never changes by itself: a use at time t is worth 2^(t / half_life) for
    ever, a span's score is the sum of its uses, and nothing is ever scored anew.

    Options:
        half_life: in the unit below; `inf`, plain LFU, counts all uses alike.
        unit: `s`, seconds (the default); `accesses`, admissions to the cache, whomever
            they use; `touches`, the span's own uses, so that nothing fades while idle.
        decay: in place of `half_life`, the factor per access or touch, as in
            score = score · decay + 1. With 0.9 the third use in a row scores 2.71, and
            ten accesses later it is 0.94 (`accesses`, the default) or still 2.71
            (`touches`).

    Source: Robinson and Devarakonda, "Data cache management using frequency-based
    replacement", SIGMETRICS 1990 (ageing); Lee et al., "LRFU", IEEE TC 2001 (exponential).
    """

    name: ClassVar[str] = "lfu"

    half_life: float | None = attrs.field(default=None)
    unit: Literal["s", "accesses", "touches"] | None = attrs.field(default=None)
    decay: float | None = attrs.field(default=None)

    def __attrs_post_init__(self) -> None:
        """Check the options against one another."""
        if self.unit is None:
            self.unit = "s" if self.decay is None else "accesses"
        elif self.unit not in UNITS:
            msg = f"lfu: unit={self.unit!r} is not known; there are: {', '.join(UNITS)}"
            raise InputError(msg)
        if self.decay is not None:
            if self.half_life is not None or self.unit == "s":
                msg = (
                    "lfu: decay is a factor per access or touch, in place of half_life: give "
                    "it with unit=accesses or unit=touches, and without half_life"
                )
                raise InputError(msg)
            if not 0 < self.decay <= 1:
                msg = f"lfu: decay={self.decay} must be above 0 and at most 1"
                raise InputError(msg)
        elif self.half_life is None:
            self.half_life = DEFAULT_HALF_LIFE[self.unit]
        elif not self.half_life > 0:
            msg = f"lfu: half_life={self.half_life} must be above 0 (inf: no decay)"
            raise InputError(msg)
        self._plain = self.half_life == inf or self.decay == 1
        if not self._plain and self.decay is None:
            assert self.half_life is not None
            numerator, denominator = self.half_life.as_integer_ratio()
            if self.unit == "s":
                numerator *= NS_PER_S
            self._period = numerator, denominator

    def on_insert(self, span: Span, now: int) -> None:
        """Count the first use."""
        span.data = self._use(span, now)

    def on_access(self, span: Span, now: int) -> None:
        """Let the past fade and count a use."""
        if self._plain:
            return
        if self.unit == "touches":
            span.data = span.data * self._touch_decay() + 1
        else:
            span.data = plus(span.data, self._use(span, now))

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves have the same past."""
        upper.data = lower.data

    def score(self, span: Span, now: int) -> Any:
        """Return the sum of its uses: a count, or a weight that never changes by itself."""
        del now
        if self._plain:
            return span.hit_count
        if self.unit == "touches":
            return span.data
        return order(span.data)

    def frequency(self, span: Span, *, now: int = 0, accesses: int = 0) -> float:
        """Return the frequency of `span` at `now` ns, or once there were `accesses` opens."""
        if self._plain:
            return span.hit_count + 1.0
        if self.unit == "touches":
            return float(span.data)
        return over(span.data, self._growth(now if self.unit == "s" else accesses))

    def _use(self, span: Span, now: int) -> Any:
        if self._plain:
            return None
        if self.unit == "touches":
            return 1.0
        return self._growth(now if self.unit == "s" else span.last_hit_order)

    def _growth(self, moment: int) -> Weight:
        """Return what a use at `moment` (ns or opens) weighs: one half life doubles it."""
        if self.decay is not None:
            return power(1 / self.decay, moment)
        numerator, denominator = self._period
        return exp2(moment * denominator, numerator)

    def _touch_decay(self) -> float:
        if self.decay is not None:
            return self.decay
        numerator, denominator = self._period
        return over(ONE, exp2(denominator, numerator))
