"""Models, devices and codecs: shapes, memory and compute costs."""
