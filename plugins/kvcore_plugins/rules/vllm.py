"""The rules of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

import kvcore
from kvcore.cache import LayerPlan
from kvcore.models.memory import KVLayout
from kvcore.serving.rules import Reserve, Rules


@attrs.define(slots=False, kw_only=True, eq=False)
class VLLM(Rules):
    """vLLM 0.33 V1 as `vllm serve` starts it on an H100: asynchronous scheduling, chunked
    prefill and prefix caching. --like vllm:lag=0 is --no-async-scheduling; --scheduler
    priority is --scheduling-policy priority.

    Args:
        duplicates: whether a block that two requests have computed is kept twice, as vLLM
            does, at some twenty times the CPU time.
    """  # noqa: D205 - a paragraph that `--show` prints

    name: ClassVar[str] = "vllm"
    first_output: ClassVar[str | None] = "decode"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_tokens": 8192,
        "max_seqs": 1024,
        "steps": "mixed",
        "chunked": True,
        "watermark": 0.0,
        "scheduler": "fcfs",
        "eviction": "lru",
        "prefix": "hashed",
    }

    # What each decides is said at `Rules`.
    unchunked: Literal["alone", "wait"] = "wait"
    reserve: Reserve = "chunk"
    commit: Literal["computed", "scheduled"] = "scheduled"
    generated: Literal["keyed", "cached"] = "cached"
    admit_after_preemption: bool = False
    ties: Literal["last", "first"] = "first"
    lag: int = 1
    null_block: bool = True
    duplicates: bool = False

    def layer_plan(self, layout: KVLayout, devices: int) -> LayerPlan | None:
        """Return cache groups; with `duplicates` of any model, since their blocks have copies.

        In a tree of spans a request that has computed what is known by then gives up its own.
        """
        if not self.duplicates:
            return super().layer_plan(layout, devices)
        return kvcore.groups_of(layout.model, layout.block_size, layout.codec, devices)
