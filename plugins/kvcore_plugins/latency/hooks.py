"""Registers the built-in latency models."""

from __future__ import annotations

from kvcore import LatencyModel, hookimpl
from kvcore_plugins.latency.linear import Linear
from kvcore_plugins.latency.roofline import Roofline
from kvcore_plugins.latency.table import Table
from kvcore_plugins.latency.token_rate import TokenRate


@hookimpl
def kvcore_latency_models() -> list[type[LatencyModel]]:
    """Return the built-in latency models."""
    return [Linear, Roofline, Table, TokenRate]
