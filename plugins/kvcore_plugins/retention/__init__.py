"""The built-in retention policies."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.retention.expected import Expected
    from kvcore_plugins.retention.full import Full
    from kvcore_plugins.retention.h2o import H2O
    from kvcore_plugins.retention.knorm import KNorm
    from kvcore_plugins.retention.random import Random
    from kvcore_plugins.retention.snapkv import SnapKV
    from kvcore_plugins.retention.tova import TOVA
    from kvcore_plugins.retention.window import Window
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "expected": "Expected",
            "full": "Full",
            "h2o": "H2O",
            "knorm": "KNorm",
            "random": "Random",
            "snapkv": "SnapKV",
            "tova": "TOVA",
            "window": "Window",
        },
    )

__all__ = ["H2O", "TOVA", "Expected", "Full", "KNorm", "Random", "SnapKV", "Window"]
