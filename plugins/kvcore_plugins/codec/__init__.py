"""The built-in codecs."""

from kvcore_plugins.codec.plain import BF16, FP16, FP32

__all__ = ["BF16", "FP16", "FP32"]
