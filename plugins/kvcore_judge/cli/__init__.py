"""The verbs of the judge."""
