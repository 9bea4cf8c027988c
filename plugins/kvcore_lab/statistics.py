"""Intervals: of means of repeated runs, and of figures of recorded traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from math import fsum, inf, nan, sqrt
from random import Random
from typing import NamedTuple, TypeAlias

from kvcore.request import Request

# Quantiles of 97.5 % of Student's t by degrees of freedom, from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
      2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


def t_quantile(degrees: int) -> float:
    """Return the quantile of 97.5 % of Student's t; beyond the table to three digits.

    Without a degree of freedom it is infinite: one run says nothing of others.

    Source: Cornish and Fisher's expansion: Abramowitz and Stegun, "Handbook of Mathematical
    Functions", 26.7.5.
    """
    if degrees < 1:
        return inf
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % of a share, as if the trials were independent.

    Without a trial it is all from 0 to 1.

    Source: Wilson, "Probable inference, the law of succession", 1927.
    """
    if not trials:
        return 0.0, 1.0
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
    coming = iter(requests)
    head = list(islice(coming, _FIRST))
    if all(request.session is None for request in head):
        return {}
    numbers, sessions = count(), dict[str, int]()
    groups = {}
    for request in chain(head, coming):
        name = request.session
        group = next(numbers) if name is None else sessions.get(name, -1)
        if group < 0:
            group = sessions[str(name)] = next(numbers)
        groups[request.id] = group % SESSIONS
    return groups if next(numbers) > STRETCHES else {}


Parts: TypeAlias = Sequence[Sequence[float]]
"""What groups of requests add to a figure, and to what it is divided by: a list each."""


def sums(
    values: Sequence[float], weights: Sequence[float] | float, groups: Sequence[int] = ()
) -> Parts | None:
    """Return the parts of groups of requests in a figure; None: it has no divisor.

    Args:
        values: what each request adds to the figure, in the order of arrival.
        weights: what each request adds to the divisor; a number: a divisor that does not
            depend on the requests, such as the time, of which each group has as much.
        groups: the group of each request; none: they are `STRETCHES` stretches of time.
    """
    groups = groups or [index * STRETCHES // len(values) for index in range(len(values))]
    count = max(STRETCHES, 1 + max(groups, default=0))
    above, below = [0.0] * count, [0.0] * count
    if not isinstance(weights, Sequence):
        below, weights = [weights / count] * count, [0.0] * len(values)
    for group, value, weight in zip(groups, values, weights, strict=True):
        above[group] += value
        below[group] += weight
    return (above, below) if any(below) else None


def ratio(parts: Parts) -> float:
    """Return the figure that has these parts."""
    return fsum(parts[0]) / fsum(parts[1])


def bootstrap(parts: Parts, first: Parts | None = None) -> tuple[float, float]:
    """Return the interval of 95 % of a figure, if other requests had come.

    Groups are drawn with all that they add, so that a share of what was looked up stays one.
    With `first`, it is the interval of the difference to the figure of another policy, which
    has the same groups in each draw. It says how much a figure rests on few sessions, or
    stretches, of this traffic, nothing about other traffic.
    """
    draw = Random(0)  # noqa: S311 - a bootstrap, not a secret
    indices = range(len(parts[0]))
    figures = []
    for _ in range(_DRAWS):
        drawn = draw.choices(indices, k=len(indices))
        samples = [
            [[column[index] for index in drawn] for column in each]
            for each in (parts, first)
            if each is not None
        ]
        if all(any(weights) for _, weights in samples):
            figure, *others = map(ratio, samples)
            figures.append(figure - sum(others))
    if not figures:
        return nan, nan
    figures.sort()
    tail = len(figures) * _TAIL // _DRAWS
    return figures[tail], figures[-1 - tail]
