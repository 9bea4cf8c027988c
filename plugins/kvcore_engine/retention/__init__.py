"""Retention policies that see tokens, and their contract."""
