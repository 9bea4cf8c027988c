"""Retention policies of every kind, each made anew: one instance serves one cache."""

from functools import partial
from typing import ClassVar

import attrs
from hypothesis import strategies as st

from kvcore import ScoreRetention
from kvcore.cache import RetentionPolicy
from kvcore_plugins.retention import Window


class Budget(ScoreRetention):
    """Says how many tokens stay, as every policy that scores tokens, and never which."""

    name: ClassVar[str] = "budget"

    def score(self, held):
        """Refuse: nothing is scored where there are no tensors."""
        msg = f"asked for the scores of {held}"
        raise NotImplementedError(msg)


@attrs.define(slots=False, eq=False)
class Eager(RetentionPolicy):
    """Keeps some tokens whenever there are more, in the midst of a prompt too."""

    name: ClassVar[str] = "eager"

    tokens: int = 4

    def keeps(self, seq):
        """Return how many."""
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
"""Functions that make a policy: of ranges, of budgets, and both."""
