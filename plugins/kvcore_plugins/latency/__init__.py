"""The built-in latency models."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.latency.linear import Linear
    from kvcore_plugins.latency.roofline import Roofline
    from kvcore_plugins.latency.table import Table
    from kvcore_plugins.latency.token_rate import TokenRate
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "linear": "Linear",
            "roofline": "Roofline",
            "table": "Table",
            "token_rate": "TokenRate",
        },
    )

__all__ = ["Linear", "Roofline", "Table", "TokenRate"]
