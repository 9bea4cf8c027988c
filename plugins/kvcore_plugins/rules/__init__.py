"""The rules of engines."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.rules.sglang import SGLang
    from kvcore_plugins.rules.vllm import VLLM
else:
    from kvcore_plugins.hooks import kvcore_rules

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_rules())

__all__ = ["VLLM", "SGLang"]
