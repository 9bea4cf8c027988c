"""Experiments: untimed replay, the optimum, comparisons of policies, what a cache saves."""

from kvcore.lab.attention import WORKED_EXAMPLE, OneHead
from kvcore.lab.caching import (
    Dense,
    Generation,
    Keeping,
    Nothing,
    Paged,
    causal_attention,
    generate,
    with_and_without_cache,
)
from kvcore.lab.compare import SHARING, Comparison, Infinite, Row, Source, compare
from kvcore.lab.optimum import Future, Optimum
from kvcore.lab.untimed import replay, served

__all__ = [
    "SHARING",
    "WORKED_EXAMPLE",
    "Comparison",
    "Dense",
    "Future",
    "Generation",
    "Infinite",
    "Keeping",
    "Nothing",
    "OneHead",
    "Optimum",
    "Paged",
    "Row",
    "Source",
    "causal_attention",
    "compare",
    "generate",
    "replay",
    "served",
    "with_and_without_cache",
]
