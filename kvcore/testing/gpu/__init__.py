"""Everything that says CUDA, in one command: `python -m kvcore.testing.gpu`."""
