"""The command line: a module for each verb, `main` that runs them, and their common parts."""
