"""Experiments on caches: comparisons, curves, miss reasons, what-if, sweeps."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.analysis.belady import Belady, Future
    from kvcore.analysis.capacity import find_capacity
    from kvcore.analysis.comparison import SHARING, Comparison, Infinite, Row, Source, compare
    from kvcore.analysis.miss_reasons import Explanation
    from kvcore.analysis.misses import explain
    from kvcore.analysis.mrc import Curve, Curves, Steps, curve
    from kvcore.analysis.recorded_run import RunSummary
    from kvcore.analysis.serial_replay import replay, served
    from kvcore.analysis.what_if import Change, RequestOutcome, WhatIf, whatif
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "belady": "Belady Future",
            "capacity": "find_capacity",
            "comparison": "SHARING Comparison Infinite Row Source compare",
            "miss_reasons": "Explanation",
            "misses": "explain",
            "mrc": "Curve Curves Steps curve",
            "recorded_run": "RunSummary",
            "serial_replay": "replay served",
            "what_if": "Change RequestOutcome WhatIf whatif",
        },
    )

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
