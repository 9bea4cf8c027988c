"""The prefill that hits save: tokens, and the least seconds of one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvcore.hookspecs import Ran
from kvcore.models.cost import PrefillCost, attended_pairs
from kvcore.units import format_seconds

if TYPE_CHECKING:
    from kvcore.config import RunParts


def prefill_seconds(cost: PrefillCost, lengths: Sequence[int]) -> float:
    """Return the least seconds to prefill prompts of these lengths, nothing of them cached."""
    tokens = sum(lengths)
    seconds = tokens * cost.token_seconds
    for window, pair_seconds in cost.pair_seconds:
        if window is None:
            pairs = (sum(map(mul, lengths, lengths)) + tokens) // 2
        else:
            pairs = sum(map(attended_pairs, repeat(0), lengths, repeat(window)))
        seconds += pairs * pair_seconds
    return seconds


class Savings(NamedTuple):
    """The prefill that hits saved, of a run or of a replay.

    Attributes:
        tokens, prompt_tokens: prompt tokens that hit, in the pool or a tier; and all of them.
        saved_s, prefill_s: the least seconds in which one device prefills these.
        model, device: those of the seconds.
    """

    tokens: int
    prompt_tokens: int
    saved_s: float
    prefill_s: float
    model: str
    device: str

    @classmethod
    def from_lengths(
        cls, cost: PrefillCost, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> Self:
        """Sum the lengths of prompts and of their hits, some requests at a time."""
        tokens = prompt_tokens = 0
        saved_s = prefill_s = 0.0
        for prompts, hits in pairs:
            tokens += sum(hits)
            prompt_tokens += sum(prompts)
            saved_s += prefill_seconds(cost, hits)
            prefill_s += prefill_seconds(cost, prompts)
        return cls(tokens, prompt_tokens, saved_s, prefill_s, cost.model, cost.device)

    def __str__(self) -> str:
        """Return a sentence; empty if nothing hit."""
        if not self.tokens:
            return ""
        return (
            f"Prefix caching saved {self.tokens:,} of {self.prompt_tokens:,} prompt tokens: at "
            f"least {format_seconds(self.saved_s)} of prefill on one {self.device}, of "
            f"{format_seconds(self.prefill_s)} in all."
        )


def savings_of(parts: RunParts, result: Any) -> Ran:
    """Return the savings of a simulation, for its report."""
    from kvcore_plugins.load import finished_work  # noqa: PLC0415 - `explain` does without

    if parts.recompute is None:
        return Ran()
    work = finished_work(result.log)
    savings = Savings.from_lengths(
        parts.recompute, ((prompts, hits) for _, prompts, hits, _ in work)
    )
    return Ran({"savings": savings._asdict()}, [str(savings)])
