"""The verbs of pages."""
