"""Eviction policies of kvcore in SGLang: `--radix-eviction-policy kvcore`."""

from kvcore_sglang.plugin import register

__all__ = ["register"]
