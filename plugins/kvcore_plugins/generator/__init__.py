"""Built-in generators."""

from kvcore_plugins.generator.huggingface import HuggingFace
from kvcore_plugins.generator.induction import Induction
from kvcore_plugins.generator.sincos import SinCos
from kvcore_plugins.generator.transformer import Transformer

__all__ = ["HuggingFace", "Induction", "SinCos", "Transformer"]
