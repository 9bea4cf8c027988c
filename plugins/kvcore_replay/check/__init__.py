"""The check of a trace: its lines must describe a run that could have happened."""
