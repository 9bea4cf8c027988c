"""Built-in generators."""

from kvcore_plugins.generators.huggingface import HuggingFace
from kvcore_plugins.generators.sincos import SinCos
from kvcore_plugins.generators.transformer import Transformer

__all__ = ["HuggingFace", "SinCos", "Transformer"]
