"""Reports on simulations: sentences, tables, and CSV."""
