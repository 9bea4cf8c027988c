"""Experiments: untimed replay, the optimum, and comparisons of policies."""

from kvcore.lab.compare import SHARING, Comparison, Infinite, Row, Source, compare
from kvcore.lab.optimum import Future, Optimum
from kvcore.lab.untimed import replay, served

__all__ = [
    "SHARING",
    "Comparison",
    "Future",
    "Infinite",
    "Optimum",
    "Row",
    "Source",
    "compare",
    "replay",
    "served",
]
