"""Runs with contiguous memory, as servers allocated it before paging."""
