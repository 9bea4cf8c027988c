"""Reports on simulations and on sizes of K/V: sentences, tables, and CSV."""
