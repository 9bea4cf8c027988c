"""Retention policies that see tokens, and their contracts."""

from kvcore_engine.retention.page_selection import PageSelection
from kvcore_engine.retention.token_retention import (
    HeldTokens,
    Reads,
    ScoreRetention,
    TokenRetention,
)

__all__ = ["HeldTokens", "PageSelection", "Reads", "ScoreRetention", "TokenRetention"]
