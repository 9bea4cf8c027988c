"""The command line: `main`, the parts that verbs share, and the verbs of the core."""
