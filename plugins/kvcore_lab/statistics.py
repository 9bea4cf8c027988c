"""Means of repeated runs with their intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import NamedTuple

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
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of one value or more."""
        runs = len(values)
        mean = fsum(values) / runs
        if runs == 1:
            return cls(mean, None, runs)
        variance = fsum((value - mean) ** 2 for value in values) / (runs - 1)
        return cls(mean, t_quantile(runs - 1) * sqrt(variance / runs), runs)
