"""The built-in latency models."""

from kvcore_plugins.latency.linear import Linear
from kvcore_plugins.latency.roofline import Roofline
from kvcore_plugins.latency.table import Table
from kvcore_plugins.latency.token_rate import TokenRate

__all__ = ["Linear", "Roofline", "Table", "TokenRate"]
