"""Measured servers: latency models fitted to them, and simulations beside them."""
