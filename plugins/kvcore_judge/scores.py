"""Scores: means over cells in decimal arithmetic, the worst cell, and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Context, Decimal, localcontext
from random import Random

import attrs

_EXACT = Context(prec=28)
_DRAWS = 1000
_TAIL = 25
"""Draws of a bootstrap, and how many of them lie outside its interval of 95 % on each side."""


@attrs.frozen
class Ratio:
    """The hits of a policy in a cell, beside those of LRU and of the optimum.

    Attributes:
        cell: name of the cell: stream and share.
        ratio: hits over those of LRU; where LRU hits nothing, over those of the optimum; None
            where nothing can hit.
        of_optimum: hits over those of the optimum; None where that hits nothing.
        tuned: whether the policy was tuned on the stream.
    """

    cell: str
    ratio: Decimal | None
    of_optimum: Decimal | None
    tuned: bool = False


@attrs.frozen
class Score:
    """The score of a policy.

    Attributes:
        headline: geometric mean of the ratios of cells on which it was not tuned; None
            without such cells.
        all_cells: the same over all cells.
        worst: the least ratio of all cells, and the name of that cell.
        of_optimum: geometric mean of the shares of the optimum, over all cells.
    """

    headline: str | None
    all_cells: str | None
    worst: tuple[str, str] | None
    of_optimum: str | None


def ratio_of(cell: str, hits: int, lru: int, optimum: int, *, tuned: bool = False) -> Ratio:
    """Return the ratio of a cell. A policy without hits counts as one with one hit."""
    share = _EXACT.divide(Decimal(max(hits, 1)), Decimal(optimum)) if optimum else None
    ratio = _EXACT.divide(Decimal(max(hits, 1)), Decimal(lru)) if lru else share
    return Ratio(cell, ratio, share, tuned)


def score_of(ratios: Sequence[Ratio]) -> Score:
    """Return the score of a policy from its cells."""
    known = [(ratio.ratio, ratio.cell) for ratio in ratios if ratio.ratio is not None]
    worst = min(known, default=None)
    return Score(
        headline=_mean(ratio.ratio for ratio in ratios if not ratio.tuned),
        all_cells=_mean(ratio.ratio for ratio in ratios),
        worst=None if worst is None else (_digits(worst[0]), worst[1]),
        of_optimum=_mean(ratio.of_optimum for ratio in ratios),
    )


def _mean(ratios: Iterable[Decimal | None]) -> str | None:
    """Return the geometric mean with four digits; None without ratios."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    # Decimal logarithms are rounded correctly, so that machines agree on every digit.
    with localcontext(_EXACT):
        mean = sum((ratio.ln() for ratio in known), Decimal(0)) / len(known)
        return _digits(mean.exp())


def _digits(value: Decimal) -> str:
    return str(value.quantize(Decimal("0.0001")))


def interval(hits: Sequence[int], lru: Sequence[int]) -> tuple[str, str] | None:
    """Return the interval of 95 % of hits over those of LRU within a stream.

    By a paired bootstrap over stretches of the stream: both policies have the same requests in
    each. It tells how much a ratio rests on few stretches, nothing about other streams. None
    if LRU hits nothing.
    """
    draw = Random(0)  # noqa: S311 - a bootstrap, not a secret
    count, ratios = len(hits), []
    for _ in range(_DRAWS):
        draws = [draw.randrange(count) for _ in range(count)]
        base = sum(lru[index] for index in draws)
        if base:
            ours = sum(hits[index] for index in draws)
            ratios.append(_EXACT.divide(Decimal(ours), Decimal(base)))
    if not ratios:
        return None
    ratios.sort()
    tail = len(ratios) * _TAIL // _DRAWS
    return _digits(ratios[tail]), _digits(ratios[-1 - tail])
