"""Triton kernels of the torch backends."""
