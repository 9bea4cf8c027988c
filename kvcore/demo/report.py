"""What a cache saves, for people: three generations side by side, and one head by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import attrs

from kvcore.demo.caching import Generation
from kvcore.demo.one_head import OneHead
from kvcore.models.spec import ModelSpec
from kvcore.report.simulation import BARS
from kvcore.report.tables import counted
from kvcore.units import format_bytes, format_seconds

PARTS = 4
"""Parts of the output for which the time of a step is told."""


WIDTH = 20
"""Bars that draw the time of a step over the output."""


SHOWN = 12
"""Tokens of the output that are shown."""


Row = list[str]


@attrs.frozen
class CachingReport:
    """The same output, generated without a cache and with two kinds of it.

    Attributes:
        generations: without a cache first; their tokens are equal.
        model, dtype: what generated them, computing in what.
        prompt_tokens, block_size: tokens of the prompt, and of a block of the paged cache.
    """

    generations: Sequence[Generation]
    model: ModelSpec
    dtype: str
    prompt_tokens: int
    block_size: int

    @property
    def headline(self) -> str:
        """What was run, and that all came to the same."""
        tokens = self.generations[0].tokens
        shown = " ".join(map(str, tokens[:SHOWN])) + (" ..." if len(tokens) > SHOWN else "")
        model = self.model
        return (
            f"{model.name}: {counted(model.layers, 'layer')} with "
            f"{counted(model.query_heads, 'query head')} and "
            f"{counted(model.kv_heads, 'K/V head')}, in {self.dtype}.\n"
            f"{counted(self.prompt_tokens, 'prompt token')}, then "
            f"{counted(len(tokens), 'new one')}: equal in all three, {shown}"
        )

    @property
    def headers(self) -> Row:
        """The headers of what was counted."""
        return ["cache", "token projections", "K/V after step 1", "K/V at the end"]

    @property
    def rows(self) -> list[Row]:
        """What was counted, a row each way."""
        return [
            [
                each.keeping,
                f"{each.projections:,}",
                format_bytes(each.step_bytes[0]),
                format_bytes(each.step_bytes[-1]),
            ]
            for each in self.generations
        ]

    @property
    def reading(self) -> str:
        """Where the counts come from."""
        steps, first = len(self.generations[0].tokens), self.prompt_tokens
        naive, *cached = (each.projections for each in self.generations)
        sums = [f"{first + place:,}" for place in range(min(steps, 3))]
        if steps > len(sums):
            sums[2:] = ["...", f"{first + steps - 1:,}"]
        fewer = f", {naive / cached[0]:,.0f} times fewer" if steps > 1 else ""
        return (
            "A token projection makes the key and the value of one token, in every layer. "
            "Without a cache each step makes those of all tokens so far: "
            f"{' + '.join(sums)} = {naive:,}. With one, the first step makes the prompt's, and "
            "each later one those of the one token that is new: "
            f"{first:,} + {steps - 1:,} = {cached[0]:,}{fewer}.\n"
            "The dense cache reserves room for the last token before the first is there; the "
            f"paged one takes a block of {counted(self.block_size, 'token')} when it needs one."
        )

    @property
    def time_headers(self) -> Row:
        """The headers of the times: which tokens of the output."""
        bounds = _bounds(len(self.generations[0].tokens), PARTS)
        return ["time of a step", *(_span(begin + 1, end) for begin, end in bounds), ""]

    @property
    def time_rows(self) -> list[Row]:
        """The median time of a step in each part of the output, and a line of bars."""
        lines = [_medians(each.step_seconds, WIDTH) for each in self.generations]
        longest = max(map(max, lines))
        bars = [
            "".join(BARS[int(time / longest * (len(BARS) - 1))] for time in line)
            for line in lines
        ]
        return [
            [each.keeping, *map(format_seconds, _medians(each.step_seconds, PARTS)), bar]
            for each, bar in zip(self.generations, bars, strict=True)
        ]


@attrs.frozen
class OneHeadReport:
    """Attention of one head, a row for each token it attends to."""

    head: OneHead

    @property
    def headline(self) -> str:
        """What is asked of the cache."""
        count = counted(len(self.head.keys), "cached token")
        return f"One head by hand: the query {_vector(self.head.query)} reads {count}."

    @property
    def headers(self) -> Row:
        """The headers of the steps, from left to right."""
        return ["token", "key", "score q·k", "e^score", "weight", "value", "weight × value"]

    @property
    def rows(self) -> list[Row]:
        """The steps of each token, and below them the sums."""
        head = self.head
        tokens = zip(
            head.keys, head.scores, head.exponentials, head.weights, head.values, strict=True
        )
        rows = [
            [
                str(place),
                _vector(key),
                f"{score:g}",
                f"{exponential:.3f}",
                f"{weight:.3f}",
                _vector(value),
                _vector([weight * number for number in value]),
            ]
            for place, (key, score, exponential, weight, value) in enumerate(tokens)
        ]
        total = ["sum", "", "", f"{head.total:.3f}", "1", "", _vector(head.output)]
        return [*rows, total]

    @property
    def reading(self) -> str:
        """What of it is new in the next step."""
        return (
            f"The output is {_vector(self.head.output)}. The next token brings a query, a key "
            "and a value of its own; the keys and values above stay as they are, which is why "
            "they are kept."
        )


def _bounds(steps: int, parts: int) -> list[tuple[int, int]]:
    """Divide `steps` into `parts` of about the same length, none of them empty."""
    parts = min(parts, steps)
    cuts = [steps * part // parts for part in range(parts + 1)]
    return list(pairwise(cuts))


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _medians(seconds: Sequence[float], parts: int) -> list[float]:
    return [median(seconds[begin:end]) for begin, end in _bounds(len(seconds), parts)]


def _vector(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{round(number, 3):g}' for number in numbers)}]"
