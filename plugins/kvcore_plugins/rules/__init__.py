"""The rules of engines."""

from kvcore_plugins.rules.sglang import SGLang
from kvcore_plugins.rules.vllm import VLLM

__all__ = ["VLLM", "SGLang"]
