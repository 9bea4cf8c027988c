"""Drafters that see tokens, and their contract."""

from kvcore_engine.drafter.token_drafter import Draft, DraftSequence, TokenDrafter

__all__ = ["Draft", "DraftSequence", "TokenDrafter"]
