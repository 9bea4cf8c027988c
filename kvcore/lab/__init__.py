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
from kvcore.lab.curves import Curve, Curves, Steps, curve
from kvcore.lab.explaining import Explanation, explain
from kvcore.lab.optimum import Future, Optimum
from kvcore.lab.rerun import Change, Fate, Figures, WhatIf, whatif
from kvcore.lab.untimed import replay, served

__all__ = [
    "SHARING",
    "WORKED_EXAMPLE",
    "Change",
    "Comparison",
    "Curve",
    "Curves",
    "Dense",
    "Explanation",
    "Fate",
    "Figures",
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
    "Steps",
    "WhatIf",
    "causal_attention",
    "compare",
    "curve",
    "explain",
    "generate",
    "replay",
    "served",
    "whatif",
    "with_and_without_cache",
]
