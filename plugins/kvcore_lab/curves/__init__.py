"""Hits by the size of the pool, and of a tier below it."""
