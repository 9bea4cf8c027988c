"""Experiments: comparisons, curves, explanations, plans, sweeps, and all they print."""
