"""The built-in codecs."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.codec.fp8 import E4M3, E5M2
    from kvcore_plugins.codec.integer import INT4, INT8, KIVI
    from kvcore_plugins.codec.plain import BF16, FP16, FP32, FP64
else:
    from kvcore_plugins.hooks import kvcore_codecs

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_codecs())

__all__ = ["BF16", "E4M3", "E5M2", "FP16", "FP32", "FP64", "INT4", "INT8", "KIVI"]
