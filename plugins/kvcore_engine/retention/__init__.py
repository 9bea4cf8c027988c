"""Retention policies that see tokens, and their contract."""

from kvcore_engine.retention.token_retention import (
    HeldTokens,
    Reads,
    ScoreRetention,
    TokenRetention,
)

__all__ = ["HeldTokens", "Reads", "ScoreRetention", "TokenRetention"]
