"""The command line: `main` is its frame, each other module a verb."""
