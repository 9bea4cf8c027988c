"""Reports on traces: tables, plots and other formats."""
