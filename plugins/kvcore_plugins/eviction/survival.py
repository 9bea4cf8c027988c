"""Survival: how likely waits are to end at an age, and what it is worth to wait on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

_CAP, _TINY = 0.95, 1e-6
"""The maximum of a hazard; a chance that is left in any case, so that seconds go on."""


def hazards(
    ended: Sequence[float], left: Sequence[float], prior: list[float], weight: float
) -> list[float]:
    """Return by bucket the share of the waits that end in it, of those that reach it.

    Waits that `left` a bucket without an end, and open ones, have reached only the buckets
    before it.
    """
    reached = list(accumulate(reversed([a + b for a, b in zip(ended, left, strict=True)])))
    reached.reverse()
    return [
        (end + weight * before) / (reach - lost + weight)
        for end, lost, reach, before in zip(ended, left, reached, prior, strict=True)
    ]


def indices(hazards: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return by bucket the Gittins index: the best chance of an end per expected second.

    The best over all ages at which to give up; the seconds are those until the end, or until
    then. `widths` are the seconds of each bucket. O(buckets).
    """
    shares = [hazard if hazard < _CAP else _CAP for hazard in hazards]  # faster than min()
    chances = [*accumulate(shares, lambda chance, share: chance * (1 - share), initial=1.0)]
    seconds = (
        (chance + _TINY) * width * (1 - share / 2)
        for chance, width, share in zip(chances, widths, shares, strict=False)
    )
    ages = [*accumulate(seconds, initial=0.0)]
    chance, age = chances[-1], ages[-1]
    # The best slopes are those of the concave hull of chances over ages: from the last bucket
    # on, each goes to a corner of the hull, and the corners below it are dropped.
    slopes, corners, best = [], [(0.0, 0.0, 0.0)], 0.0
    for start, since in zip(chances[-2::-1], ages[-2::-1], strict=True):
        slope = (start - chance) / (age - since)
        while slope < best:
            chance, age, best = corners.pop()
            slope = (start - chance) / (age - since)
        corners.append((chance, age, best))
        chance, age, best = start, since, slope
        slopes.append(slope)
    slopes.reverse()
    return slopes
