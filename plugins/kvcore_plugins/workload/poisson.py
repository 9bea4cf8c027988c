"""Random gaps between arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcore.units import NS_PER_S


def poisson_arrivals(draw: Callable[[], float], rate: float, burst: int = 1) -> Iterator[int]:
    """Yield times in ns, from 0, of Poisson arrivals at `rate` a second, `burst` at once.

    `draw` returns uniform variates in [0, 1). An infinite rate gives zeros.
    """
    now = 0
    while True:
        for _ in range(burst):
            yield now
        now += round(exponential(draw) * burst / rate * NS_PER_S)


def exponential(draw: Callable[[], float]) -> float:
    """Return an exponential variate of mean 1, made from uniform ones in [0, 1).

    Takes no logarithm, whose last bit differs between machines: draws are compared, and
    nothing else. Costs 4.3 draws on average.

    Source: von Neumann, "Various techniques used in connection with random digits", 1951.
    """
    whole = 0
    while True:
        first = last = draw()
        descent = 1
        while (value := draw()) < last:
            last = value
            descent += 1
        # For a given first draw, the descent has odd length with probability exp(-first).
        if descent % 2:
            return whole + first
        whole += 1
