"""Experiments on caches: comparisons, curves, miss reasons, what-if, sweeps."""

from kvcore.analysis.belady import Future, Optimum
from kvcore.analysis.compare import SHARING, Comparison, Infinite, Row, Source, compare
from kvcore.analysis.miss_reasons import Explanation
from kvcore.analysis.misses import explain
from kvcore.analysis.mrc import Curve, Curves, Steps, curve
from kvcore.analysis.replay import replay, served
from kvcore.analysis.whatif import Change, Fate, Figures, WhatIf, whatif

__all__ = [
    "SHARING",
    "Change",
    "Comparison",
    "Curve",
    "Curves",
    "Explanation",
    "Fate",
    "Figures",
    "Future",
    "Infinite",
    "Optimum",
    "Row",
    "Source",
    "Steps",
    "WhatIf",
    "compare",
    "curve",
    "explain",
    "replay",
    "served",
    "whatif",
]
