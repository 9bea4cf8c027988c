"""Compare eviction policies with one another, the optimum and a cache without bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import perf_counter
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore.cache import KVCache
from kvcore.cache.geometry import Geometry
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.cache.stats import CacheStats
from kvcore.errors import InputError
from kvcore.lab.optimum import Future, Optimum
from kvcore.lab.untimed import replay
from kvcore.model import PrefillCost, default_prefill_cost
from kvcore.plugins import Plugins
from kvcore.policy import EvictionPolicy, PrefixCache, Span, Workload
from kvcore.policy.plugin import Plugin, option_fields
from kvcore.request import Request
from kvcore.specs import Spec, parse
from kvcore.trace import Trace

Contender: TypeAlias = "str | Optimum | Callable[[], EvictionPolicy]"
"""A policy's name with its options, a policy class, or what builds a policy."""

Progress: TypeAlias = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Given what is done and how many steps it takes (None: unknown), yields a step counter."""

POLICIES = ("lru", "fifo", "lfu", "slru", "cost", "optimum")
"""The policies compared where none are named."""

SHARES = (0.5, 1.5, 3, 5, 15, 25)
"""The pool sizes where none are given: per cent of the workload's distinct blocks."""

_TICK = 256


@attrs.frozen(kw_only=True)
class Row:
    """One eviction policy in a pool of one size.

    Attributes:
        eviction, options: the policy.
        blocks, block_size: the pool's blocks, and a block's tokens.
        requests: how many were replayed.
        lookup_blocks, hit_blocks: blocks looked up, and hit from the first to the first miss.
        hit_ratio: the share that hit, weighted by `block`, `token` or `request` (the mean
            over requests with a lookup block); None where nothing was looked up.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        share_of_optimum: its hits per hit of the optimum (without bypass) in the same pool;
            None where that was not run or hits nothing.
        wall_s: seconds the row took, reading the workload included. Optimum rows share one
            reading, which the first of them pays.
    """

    eviction: str
    options: dict[str, Any]
    blocks: int
    block_size: int
    requests: int
    lookup_blocks: int
    hit_blocks: int
    hit_ratio: dict[str, float | None]
    evicted_blocks: int
    share_of_optimum: float | None = None
    wall_s: float


@attrs.frozen(kw_only=True)
class Infinite:
    """What a cache hits that never evicts anything: the bound for pools of all sizes.

    Attributes:
        distinct_blocks: the blocks it ends up with, enough to hit as much.
        lookup_blocks, hit_blocks, hit_ratio: as in a row.
    """

    distinct_blocks: int
    lookup_blocks: int
    hit_blocks: int
    hit_ratio: dict[str, float | None]


@attrs.frozen(kw_only=True)
class Source:
    """The workload of a comparison, without its requests."""

    name: str
    digest: str
    requests: int
    key_tokens: int
    options: dict[str, Any]


@attrs.frozen(kw_only=True)
class Comparison:
    """What `compare` returns: rows by policy, then size, as they were asked for."""

    workload: Source
    count: str
    rows: list[Row]
    infinite: Infinite


def compare(
    workload: Workload,
    policies: Iterable[Contender] = POLICIES,
    blocks: Iterable[int] | None = None,
    *,
    block_size: int | None = None,
    count: str = "keys",
    prefix: str | Callable[[], PrefixCache] = "radix",
    recompute: PrefillCost | None = None,
    seed: int = 0,
    trace: str | os.PathLike[str] | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Replay `workload`, serial and untimed, under each policy in a pool of each size.

    The workload is read once a row, and a row's memory is one cache. Policies and sizes
    given twice are run once.

    Args:
        workload: where the requests come from.
        policies: names with options (`"lfu:half_life=300"`; one text may hold several),
            policy classes, functions that build a policy, and `Optimum` or its name.
        blocks: pool sizes; None: a few shares of the workload's distinct blocks.
        block_size: tokens a block holds; None: as many as a key of the workload.
        count: `keys` or `tokens`, the two countings.
        prefix: the prefix cache, as a name with options, a class, or a function.
        recompute: what it costs to compute a block again, for policies that weigh that.
        seed: for policies with an option `seed` whose name does not set it.
        trace: the file to write every decision to; with one policy and one size.
        plugins: where names are looked up; None: what is installed.
        progress: reports how many requests have been replayed; None: nobody is told.

    Raises:
        InputError: nothing to compare, a size that is no pool's, an unknown name or option,
            a block size that does not fit the keys, a trace of several rows or of the
            optimum, the optimum in `tokens` counting, or a request that cannot be read.
        PluginError: a plugin that cannot work here.
        PolicyError: a policy failed.
    """
    plugins = plugins or Plugins()
    contenders = _contenders(policies, plugins, seed)
    sizes = None if blocks is None else _sizes(blocks)
    key_tokens = workload.key_tokens
    geometry = Geometry(count, block_size or key_tokens, key_tokens)
    _check_optimum(contenders, count, trace)
    if trace is not None and (sizes is None or len(contenders) * len(sizes) != 1):
        msg = "a trace is of one policy in a pool of one size: give one of each"
        raise InputError(msg)
    ...
