"""The configuration and the parts of a recorded run, from its trace."""
