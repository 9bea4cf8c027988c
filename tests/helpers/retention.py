"""Functions that make retention policies of every kind: one instance serves one cache."""

from functools import partial
from typing import ClassVar

import attrs
from hypothesis import strategies as st

from kvcore import ScoreRetention
from kvcore.cache import RetentionPolicy
from kvcore_engine.retention.window import Window


class Budget(ScoreRetention):
    """A policy with a number of tokens to keep, but without scores of tokens."""

    name: ClassVar[str] = "budget"

    def score(self, held):
        """Raise NotImplementedError: without tensors no token is scored."""
        msg = f"asked for the scores of {held}"
        raise NotImplementedError(msg)


@attrs.define(slots=False, eq=False)
class Eager(RetentionPolicy):
    """A policy that keeps a few tokens as soon as there are more, even within a prompt."""

    name: ClassVar[str] = "eager"

    tokens: int = 4

    def keeps(self, seq):
        """Return the number of tokens to keep."""
        del seq
        return self.tokens


windows = st.builds(
    partial,
    st.just(Window),
    tokens=st.sampled_from((1, 3, 4, 9, 20)),
    sinks=st.sampled_from((0, 1, 4, 6)),
)
budgets = st.builds(
    partial,
    st.just(Budget),
    budget=st.sampled_from((1, 3, 4, 9, 20, 0.1, 0.5, 1.0)),
    when=st.sampled_from(("always", "always", "prompt")),
)
compactions = budgets | st.builds(partial, st.just(Eager), st.sampled_from((1, 3, 4, 9, 20)))
retentions = windows | compactions
"""Strategies for functions that make a policy: of ranges, of budgets, or of either."""
