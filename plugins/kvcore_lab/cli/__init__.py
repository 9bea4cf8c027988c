"""The verbs of experiments, and the options that a run gets from this package."""
