"""Readers of traces: checks, state, what-if, reasons of misses, and exports."""
