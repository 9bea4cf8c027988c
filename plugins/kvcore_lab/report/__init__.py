"""Results of experiments as tables, plots, metrics and notebooks."""
