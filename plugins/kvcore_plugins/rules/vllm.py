"""The rules of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from kvcore.serving.rules import Reserve, Rules


@attrs.define(slots=False, kw_only=True, eq=False)
class VLLM(Rules):
    """vLLM 0.33 V1 as `vllm serve` starts it on an H100: asynchronous scheduling, chunked
    prefill and prefix caching. --like vllm:lag=0 is --no-async-scheduling; --scheduler
    priority is --scheduling-policy priority.
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

    unchunked: Literal["alone", "wait"] = "wait"
    reserve: Reserve = "chunk"
    commit: Literal["computed", "scheduled"] = "scheduled"
    generated: Literal["keyed", "cached"] = "cached"
    admit_after_preemption: bool = False
    ties: Literal["last", "first"] = "first"
    lag: int = 1
    null_block: bool = True
