"""SnapKV: tokens that the end of the prompt attends to."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from kvcore import InputError, ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads


@attrs.define(slots=False, eq=False, kw_only=True)
class SnapKV(ScoreRetention):
    """Keep the tokens that the end of the prompt attends to, and their neighbours; once.

    The `window` newest tokens vote for those before them, by their attention weights. Votes
    are averaged over these tokens and over the query heads of a K/V head, and then over `pool`
    neighbours in the text, so that the context of a detail stays with it. The window itself
    stays. Generated tokens are all kept, unless `when` is `always`.

    Options:
        budget, sinks: as of every policy with scores; the window is part of the budget.
        window: tokens at the end of the prompt that vote, and stay.
        pool: width of the pooling, in tokens; odd. 1: none.
        when: `prompt`, or `always`: also whenever a block beyond the budget is full.

    Raises:
        InputError: also for a window of no token, or an even `pool`.

    Source: Li et al., "SnapKV: LLM knows what you are looking for before generation", NeurIPS
    2024.
    """

    name: ClassVar[str] = "snapkv"

    recent: int = attrs.field(init=False, repr=False)
    window: int = attrs.field(default=32)
    pool: int = attrs.field(default=5)
    when: Literal["always", "prompt"] = attrs.field(default="prompt")

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        problem = None
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            problem = "give 1 token or more, and an odd number of tokens"
        elif isinstance(self.budget, int) and 0 < self.budget < self.window + self.sinks:
            problem = (
                f"the window and sinks={self.sinks} are more than the budget of {self.budget} "
                "tokens: give a smaller window"
            )
        if problem:
            msg = f"snapkv: window={self.window}, pool={self.pool}: {problem}"
            raise InputError(msg)
        self.recent = self.window
        super().__attrs_post_init__()

    @property
    def reads(self) -> Reads:  # type: ignore[override] # of the instance
        """The queries of the window."""
        return Reads(queries=self.window)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the votes for each token, averaged over its neighbours in the text."""
        from torch.nn.functional import avg_pool1d  # noqa: PLC0415 - not in a simulation

        positions, weights = held.positions, held.weights
        votes = weights.mean(2).unflatten(1, (positions.shape[1], -1)).mean(2)
        # Pooling would spread the attention within the window to the tokens before it.
        votes = votes.masked_fill(positions >= held.seq.position - self.window, 0)
        order = positions.argsort(-1)
        pooled = avg_pool1d(
            votes.gather(-1, order), self.pool, stride=1, padding=self.pool // 2
        )
        return votes.scatter(-1, order, pooled)
