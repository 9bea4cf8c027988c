"""Attention of one head, with every number of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import mul
from typing import Any, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.sections import Section, Table
from kvcore_cli.report.tables import counted

Vector: TypeAlias = Sequence[float]


@attrs.frozen
class OneHead:
    """Attention of one query over the tokens of a cache, in plain Python.

    Two steps of a model are left out: scores are not divided by the root of the width, nor
    lowered by the greatest of them, which changes no weight and keeps the exponentials from
    overflowing.

    Attributes:
        query: query of the newest token, `[width]`.
        keys: keys of all tokens so far, the newest included, `[tokens][width]`.
        values: values of the same tokens, `[tokens][value width]`.

    Raises:
        InputError: there is no token, a token lacks its key or value, or widths differ.
    """

    query: Vector
    keys: Sequence[Vector]
    values: Sequence[Vector]

    def __attrs_post_init__(self) -> None:
        """Check that there are tokens, and that the widths fit."""
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
        """Dot product of the query and each key."""
        return [sum(map(mul, self.query, key)) for key in self.keys]

    @property
    def exponentials(self) -> list[float]:
        """The exponential of each score: `e ** score`."""
        return [exp(score) for score in self.scores]

    @property
    def total(self) -> float:
        """The sum of the exponentials."""
        return sum(self.exponentials)

    @property
    def weights(self) -> list[float]:
        """The exponentials divided by their sum: the softmax of the scores."""
        total = self.total
        return [exponential / total for exponential in self.exponentials]

    @property
    def output(self) -> list[float]:
        """The weighted mean of the values."""
        weighted = zip(self.weights, self.values, strict=True)
        parts = [[weight * value_of for value_of in value] for weight, value in weighted]
        return [sum(column) for column in zip(*parts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return the head and every step of its attention as JSON values."""
        steps = ("scores", "exponentials", "total", "weights", "output")
        return {**attrs.asdict(self), **{name: getattr(self, name) for name in steps}}


WORKED_EXAMPLE = OneHead(
    query=(1, 0),
    keys=((2, 0), (1, 0), (0, 0), (-1, 0)),
    values=((10, 0), (5, 0), (1, 0), (0, 0)),
)
"""Four tokens in a head of width 2: the output is 88.482 / 11.475 = 7.711, and 0."""


def head_sections(head: OneHead) -> list[Section]:
    """Return a report on the attention of a head: the steps for each token, and the sums."""
    headers = ["token", "key", "score q·k", "e^score", "weight", "value", "weight × value"]
    tokens = zip(
        head.keys, head.scores, head.exponentials, head.weights, head.values, strict=True
    )
    rows = [
        [
            str(index),
            _vector(key),
            f"{score:g}",
            f"{exponential:.3f}",
            f"{weight:.3f}",
            _vector(value),
            _vector([weight * component for component in value]),
        ]
        for index, (key, score, exponential, weight, value) in enumerate(tokens)
    ]
    total = ["sum", "", "", f"{head.total:.3f}", "1", "", _vector(head.output)]
    count = counted(len(head.keys), "cached token")
    headline = f"One head by hand: the query {_vector(head.query)} reads {count}."
    reading = (
        f"The output is {_vector(head.output)}. The next token brings a query, a key and a "
        "value of its own; the keys and values above stay as they are, which is why they are "
        "kept."
    )
    return [headline, Table(headers, [*rows, total]), reading]


def _vector(numbers: Sequence[float]) -> str:
    """Return numbers as text, rounded to three digits."""
    return f"[{', '.join(f'{round(component, 3):g}' for component in numbers)}]"
