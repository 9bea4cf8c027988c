"""Experiments on caches: comparisons, curves, miss reasons, what-if, sweeps."""

from kvcore.analysis.belady import Belady, Future
from kvcore.analysis.capacity import find_capacity
from kvcore.analysis.comparison import SHARING, Comparison, Infinite, Row, Source, compare
from kvcore.analysis.miss_reasons import Explanation
from kvcore.analysis.misses import explain
from kvcore.analysis.mrc import Curve, Curves, Steps, curve
from kvcore.analysis.recorded_run import RunSummary
from kvcore.analysis.serial_replay import replay, served
from kvcore.analysis.what_if import Change, RequestOutcome, WhatIf, whatif

__all__ = [
    "SHARING",
    "Belady",
    "Change",
    "Comparison",
    "Curve",
    "Curves",
    "Explanation",
    "Future",
    "Infinite",
    "RequestOutcome",
    "Row",
    "RunSummary",
    "Source",
    "Steps",
    "WhatIf",
    "compare",
    "curve",
    "explain",
    "find_capacity",
    "replay",
    "served",
    "whatif",
]
