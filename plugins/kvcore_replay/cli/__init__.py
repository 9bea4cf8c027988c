"""The verbs of traces, and the options that a run gets from this package."""
