"""Built-in generators."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.generator.huggingface import HuggingFace
    from kvcore_plugins.generator.induction import Induction
    from kvcore_plugins.generator.sincos import SinCos
    from kvcore_plugins.generator.transformer import Transformer
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "huggingface": "HuggingFace",
            "induction": "Induction",
            "sincos": "SinCos",
            "transformer": "Transformer",
        },
    )

__all__ = ["HuggingFace", "Induction", "SinCos", "Transformer"]
