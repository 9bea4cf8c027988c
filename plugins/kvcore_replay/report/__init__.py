"""What a trace tells as tables, plots and other formats."""
