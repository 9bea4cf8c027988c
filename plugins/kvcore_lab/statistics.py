"""Intervals: of means of repeated runs, and of figures of recorded traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from math import fsum, sqrt
from random import Random
from typing import NamedTuple

from kvcore.request import Request

# Quantiles of 97.5 % of Student's t by degrees of freedom, from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
      2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


def t_quantile(degrees: int) -> float:
    """Return the quantile of 97.5 % of Student's t; beyond the table to three digits.

    Source: Cornish and Fisher's expansion: Abramowitz and Stegun, "Handbook of Mathematical
    Functions", 26.7.5.
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % of a share, as if the trials were independent.

    Source: Wilson, "Probable inference, the law of succession", 1927.
    """
    z = 1.959964
    middle = successes + z * z / 2
    half = z * sqrt(successes * (trials - successes) / trials + z * z / 4)
    low, high = ((middle + sign * half) / (trials + z * z) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


class Interval(NamedTuple):
    """The mean of some runs, and its interval of 95 % by Student's t.

    Attributes:
        mean: the mean.
        half: half of the width of the interval; None of a single run.
        runs: number of runs.
    """

    mean: float
    half: float | None
    runs: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Interval:
        """Return the interval of one value or more."""
        runs = len(values)
        mean = fsum(values) / runs
        if runs == 1:
            return cls(mean, None, runs)
        variance = fsum((value - mean) ** 2 for value in values) / (runs - 1)
        return cls(mean, t_quantile(runs - 1) * sqrt(variance / runs), runs)


STRETCHES = 20
"""Stretches of a workload without sessions, of equal numbers of requests, that are drawn."""

SESSIONS = 200
"""Groups of sessions that are drawn: up to as many sessions each are a group of its own."""

_FIRST = 1000
"""Requests at the beginning of a workload of which one has a session, if there are any."""

_DRAWS = 1000
_TAIL = 25
"""Draws of a bootstrap, and how many of them lie outside its interval of 95 % on each side."""


def session_groups(requests: Iterable[Request]) -> dict[int | str, int]:
    """Return by the id of each request the group that its session is in, in their order.

    Sessions are dealt to `SESSIONS` groups in turn; a request without one is a session. Empty
    if there are no more sessions than `STRETCHES`, or the first requests have none.
    """
    if all(request.session is None for request in islice(iter(requests), _FIRST)):
        return {}
    numbers, sessions = count(), dict[str, int]()
    groups = {}
    for request in requests:
        name = request.session
        group = next(numbers) if name is None else sessions.get(name, -1)
        if group < 0:
            group = sessions[str(name)] = next(numbers)
        groups[request.id] = group % SESSIONS
    return groups if next(numbers) > STRETCHES else {}


def shares(
    values: Sequence[float], total: float, groups: Sequence[int] = ()
) -> list[float] | None:
    """Return the shares of a figure that groups of requests have, which add up to it.

    Args:
        values: what each request adds to the figure, in the order of arrival.
        total: what the sum of all is divided by; 0: the figure is unknown.
        groups: the group of each request; none: they are `STRETCHES` stretches of time.
    """
    if not total:
        return None
    groups = groups or [index * STRETCHES // len(values) for index in range(len(values))]
    sums = [0.0] * max(STRETCHES, 1 + max(groups, default=0))
    for group, value in zip(groups, values, strict=True):
        sums[group] += value
    return [count / total for count in sums]


def bootstrap(parts: Sequence[float]) -> tuple[float, float]:
    """Return the interval of 95 % of the sum of parts, if other ones had come.

    Of differences between two policies it is paired: both have the same requests in each. It
    says how much a figure rests on few sessions, or stretches, of this traffic, nothing about
    other traffic.
    """
    draw = Random(0)  # noqa: S311 - a bootstrap, not a secret
    count = len(parts)
    sums = sorted(fsum(draw.choices(parts, k=count)) for _ in range(_DRAWS))
    return sums[_TAIL], sums[-1 - _TAIL]
