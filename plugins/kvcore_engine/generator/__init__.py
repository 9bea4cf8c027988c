"""Built-in generators."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_engine.generator.huggingface import HuggingFace
    from kvcore_engine.generator.induction import Induction
    from kvcore_engine.generator.sincos import SinCos
    from kvcore_engine.generator.transformer import Transformer
else:
    from kvcore_engine.hooks import kvcore_generators

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_generators())

__all__ = ["HuggingFace", "Induction", "SinCos", "Transformer"]
