"""Attention of one head, every number of it kept: for people to follow."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import mul
from typing import TypeAlias

import attrs

from kvcore.errors import InputError

Vector: TypeAlias = Sequence[float]


@attrs.frozen
class OneHead:
    """One query that attends to the tokens of a cache, in plain Python.

    The scores are not divided by the root of the width, as a model would do, nor lowered by
    the greatest of them, which changes no weight and keeps the exponentials of a model from
    overflowing.

    Attributes:
        query: of the newest token.
        keys, values: of each token so far, the newest included: the cache.

    Raises:
        InputError: no token, one without key or value, or widths that do not fit.
    """

    query: Vector
    keys: Sequence[Vector]
    values: Sequence[Vector]

    def __attrs_post_init__(self) -> None:
        """Check that there is something to attend to, and that it fits."""
        if not len(self.keys) == len(self.values) > 0:
            msg = (
                f"{len(self.keys)} keys and {len(self.values)} values: give one of each for "
                "every token, and at least one token"
            )
            raise InputError(msg)
        if {len(key) for key in self.keys} != {len(self.query)}:
            msg = f"each key must have {len(self.query)} numbers, as the query has: {self.keys}"
            raise InputError(msg)
        if len({len(value) for value in self.values}) > 1:
            msg = f"values must all have as many numbers: {self.values}"
            raise InputError(msg)

    @property
    def scores(self) -> list[float]:
        """How well the query fits each key: their dot products."""
        return [sum(map(mul, self.query, key)) for key in self.keys]

    @property
    def exponentials(self) -> list[float]:
        """The scores as positive numbers: `e ** score`."""
        return [exp(score) for score in self.scores]

    @property
    def total(self) -> float:
        """Sum of the exponentials."""
        return sum(self.exponentials)

    @property
    def weights(self) -> list[float]:
        """The exponentials as shares of their sum: the softmax of the scores."""
        total = self.total
        return [number / total for number in self.exponentials]

    @property
    def output(self) -> list[float]:
        """The mean of the values, weighted."""
        weighted = zip(self.weights, self.values, strict=True)
        parts = [[weight * number for number in value] for weight, value in weighted]
        return [sum(column) for column in zip(*parts, strict=True)]


WORKED_EXAMPLE = OneHead(
    query=(1, 0),
    keys=((2, 0), (1, 0), (0, 0), (-1, 0)),
    values=((10, 0), (5, 0), (1, 0), (0, 0)),
)
"""Four tokens in a head of width 2: the output is 88.482 / 11.475 = 7.711, and 0."""
