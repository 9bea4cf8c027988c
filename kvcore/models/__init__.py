"""Models and devices: shapes, memory and compute costs."""
