"""The built-in codecs."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.codec.fp8 import E4M3, E5M2
    from kvcore_plugins.codec.integer import INT4, INT8, KIVI
    from kvcore_plugins.codec.plain import BF16, FP16, FP32, FP64
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "fp8": "E4M3 E5M2",
            "integer": "INT4 INT8 KIVI",
            "plain": "BF16 FP16 FP32 FP64",
        },
    )

__all__ = ["BF16", "E4M3", "E5M2", "FP16", "FP32", "FP64", "INT4", "INT8", "KIVI"]
