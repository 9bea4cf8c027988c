"""The engine: runs that compute K/V as tensors, and benchmarks of it."""
