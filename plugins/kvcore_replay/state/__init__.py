"""The state of a traced run at any line, rebuilt from the lines alone."""
