"""Drafters that see tokens, and their contract."""
