"""Experiments on caches: comparisons, curves, miss reasons, what-if, sweeps."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.analysis.capacity import find_capacity
    from kvcore.analysis.comparison import SHARING, Comparison, Infinite, Row, Source, compare
    from kvcore.analysis.mrc import Curve, Curves, Steps, curve
    from kvcore_replay.belady import Belady, Future
    from kvcore_replay.misses.explain import explain
    from kvcore_replay.misses.reasons import Explanation
    from kvcore_replay.recorded_run import RunSummary
    from kvcore_replay.serial_replay import replay, served
    from kvcore_replay.what_if import Change, RequestOutcome, WhatIf, whatif
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
