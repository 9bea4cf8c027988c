"""The rules of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from kvcore.errors import InputError
from kvcore.models.memory import KVLayout, is_pooled
from kvcore.serving.rules import Reserve, Rules

if TYPE_CHECKING:
    from kvcore_plugins.layer_pools import LayerPools


@attrs.define(slots=False, kw_only=True, eq=False)
class SGLang(Rules):
    """SGLang 0.5 with --schedule-policy lpm on an H100: radix cache, chunked prefill, prefill
    first. --scheduler fcfs is its default policy; its pages are --block-size 1.
    """  # noqa: D205 - a paragraph that `--show` prints

    name: ClassVar[str] = "sglang"
    first_output: ClassVar[str | None] = "transfer"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_tokens": 8192,
        "max_seqs": 2048,
        "steps": "prefill-first",
        "chunked": True,
        "watermark": 0.0,
        "scheduler": "lpm:defer_shared=32,beyond=fcfs",
        "eviction": "lru:renew_split=true",
        "prefix": "radix:evict=leaf",
    }

    reserve: Reserve = "chunk"
    generated: Literal["keyed", "cached"] = "cached"
    new_token_ratio: float | None = 0.7
    preempts: Literal["last", "shortest"] = "shortest"

    def layer_plan(self, layout: KVLayout, devices: int) -> LayerPools | None:
        """Return a pool for each kind of layer; None: all layers keep all tokens.

        Raises:
            InputError: there is no such pool for what a layer keeps.
        """
        if layout.model.uniform:
            return None
        from kvcore_plugins.layer_pools import LayerPools  # noqa: PLC0415 - few models have any

        pools = LayerPools.from_layout(layout, devices)
        if pools is None and not is_pooled(layout.model):
            msg = (
                f"{layout.model.name} has layers without a pool of SGLang's kind: give another "
                "engine's rules, such as --like vllm, which has cache groups for more of them"
            )
            raise InputError(msg)
        return pools
