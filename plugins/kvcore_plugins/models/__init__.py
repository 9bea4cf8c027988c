"""Model shapes from the files of others."""
