"""What a trace tells: checks, state, what-if, reasons of misses, and its exports."""
