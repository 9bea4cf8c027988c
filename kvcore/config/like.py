"""Likenesses: the options that make the serving loop decide as an engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import attrs

from kvcore.config.values import shown
from kvcore.errors import InputError


@attrs.frozen
class Likeness:
    """The decisions of an engine, as options of `RunConfig`.

    Options that are given beside it win, as over defaults.

    Attributes:
        name: name of the engine.
        text: its release, and the choice of its defaults.
        options: values of options by name.
    """

    name: str
    text: str
    options: Mapping[str, Any]


VLLM = Likeness(
    "vllm",
    "vLLM 0.33 V1 as `vllm serve` starts it on an H100: asynchronous scheduling, chunked "
    "prefill and prefix caching. --lag 0 is --no-async-scheduling; --scheduler priority is "
    "--scheduling-policy priority.",
    {
        "max_tokens": 8192,
        "max_seqs": 1024,
        "steps": "mixed",
        "chunked": True,
        "watermark": 0.0,
        "unchunked": "wait",
        "reserve": "chunk",
        "commit": "scheduled",
        "generated": "cached",
        "admit_after_preemption": False,
        "ties": "first",
        "lag": 1,
        "null_block": True,
        "scheduler": "fcfs",
        "eviction": "lru",
        "prefix": "hashed",
    },
)

SGLANG = Likeness(
    "sglang",
    "SGLang 0.5 with --schedule-policy lpm on an H100: radix cache, chunked prefill, prefill "
    "first. --scheduler fcfs is its default policy; its pages are --block-size 1.",
    {
        "max_tokens": 8192,
        "max_seqs": 2048,
        "steps": "prefill-first",
        "chunked": True,
        "watermark": 0.0,
        "reserve": "chunk",
        "commit": "computed",
        "generated": "cached",
        "new_token_ratio": 0.7,
        "preempts": "shortest",
        "scheduler": "lpm:defer_shared=32,beyond=fcfs",
        "eviction": "lru:renew_split=true",
        "prefix": "radix:evict=leaf",
    },
)

LIKENESSES: Mapping[str, Likeness] = {each.name: each for each in (VLLM, SGLANG)}
"""The engines that kvcore can decide like, by name."""


def as_engine(value: object) -> str:
    """Return the name of an engine that kvcore can decide like.

    Raises:
        InputError: there is no likeness of that name; names those that there are.
    """
    if isinstance(value, str) and value in LIKENESSES:
        return value
    msg = f"{shown(value)} is no engine; there are: {', '.join(LIKENESSES)}"
    raise InputError(msg)


EngineName: TypeAlias = Annotated[str, as_engine]
"""The name of an engine that kvcore can decide like."""
