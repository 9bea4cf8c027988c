"""Registers the built-in generators."""

from __future__ import annotations

from kvcore import Generator, hookimpl
from kvcore_plugins.generator.huggingface import HuggingFace
from kvcore_plugins.generator.sincos import SinCos
from kvcore_plugins.generator.transformer import Transformer


@hookimpl
def kvcore_generators() -> list[type[Generator]]:
    """Return the built-in generators."""
    return [HuggingFace, SinCos, Transformer]
