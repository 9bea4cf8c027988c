"""The built-in latency models."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.latency.linear import Linear
    from kvcore_plugins.latency.roofline import Roofline
    from kvcore_plugins.latency.table import Table
    from kvcore_plugins.latency.token_rate import TokenRate
else:
    from kvcore_plugins.hooks import kvcore_latency_models

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_latency_models())

__all__ = ["Linear", "Roofline", "Table", "TokenRate"]
