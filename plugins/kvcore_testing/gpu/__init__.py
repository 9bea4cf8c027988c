"""All tests and benchmarks that need a GPU, in one command: `python -m kvcore.testing.gpu`."""
