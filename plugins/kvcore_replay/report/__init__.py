"""Reports on traces: tables, sentences, plots, and formats of other tools."""
