"""Statistics of speculative decoding: accepted drafts, and the time that they saved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs


@attrs.define
class DraftStats:
    """Counts of speculative decoding in a run.

    Attributes:
        outcomes: steps of sequences that decode, by (drafts, accepted drafts): each gives
            one token and the accepted drafts.
        plain_ps: picoseconds that the tokens of steps without prefill would have taken, one
            token a step, by the latency model.
        took_ps: picoseconds that these steps took.
    """

    outcomes: Counter[tuple[int, int]] = attrs.Factory(Counter)
    plain_ps: int = 0
    took_ps: int = 0

    @property
    def steps(self) -> int:
        """Number of steps of sequences that decode."""
        return self.outcomes.total()

    @property
    def drafted(self) -> int:
        """Number of drafts."""
        return sum(drafted * count for (drafted, _), count in self.outcomes.items())

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(accepted * count for (_, accepted), count in self.outcomes.items())

    def plus(self, other: DraftStats) -> DraftStats:
        """Return the sum of two runs."""
        return DraftStats(
            self.outcomes + other.outcomes,
            self.plain_ps + other.plain_ps,
            self.took_ps + other.took_ps,
        )

    def probabilities(self) -> list[float]:
        """Return, by position, the share of the drafts that were accepted.

        A draft counts only if all drafts before it were accepted.
        """
        accepted, judged = Counter[int](), Counter[int]()
        for (drafts, right), count in self.outcomes.items():
            for position in range(min(drafts, right + 1)):
                judged[position] += count
                accepted[position] += count * (position < right)
        return [accepted[position] / judged[position] for position in sorted(judged)]

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON has them."""
        return {
            "sequence_steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "acceptance_by_position": self.probabilities(),
            "tokens_per_step": 1 + self.accepted / self.steps if self.steps else None,
            "speedup": self.plain_ps / self.took_ps if self.took_ps else None,
        }
