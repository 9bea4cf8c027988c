"""Readers of traces: checks, state, what-if, reasons of misses, exports and plots."""
