"""One cell: one policy on one stream in one pool, replayed; and served under a clock."""

from __future__ import annotations

import hashlib
from math import fsum
from time import process_time_ns

import attrs

from kvcore import KVCache, simulate
from kvcore.cache import Span
from kvcore.models.cost import default_prefill_cost
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import STRETCHES, Footprint, Stream, read_stream
from kvcore_replay.untimed import hits_of


@attrs.frozen
class Cell:
    """A policy, a stream, and the share of its footprint (thousandths) that the pool has."""

    entry: Entry
    stream: Stream
    share: int


@attrs.frozen
class CellResult:
    """The hits, evictions and times of a policy in a cell.

    All but `cpu_ns` is the same on every machine.

    Attributes:
        blocks: blocks of the pool.
        lookups: blocks looked up.
        hits: blocks hit, by stretch of the stream.
        saved_s: seconds of prefill that the hits save, on the default server.
        evicted: evicted blocks.
        evictions: digest of the evictions in their order.
        timed: under a clock, `mean_ttft_us` and `p99_ttft_us` (µs) and `hit_tokens`; None: the
            cell is not served so.
        cpu_ns: CPU time of the replay.
    """

    blocks: int
    lookups: int
    hits: list[int]
    saved_s: float
    evicted: int
    evictions: str
    timed: dict[str, int] | None = None
    cpu_ns: int = attrs.field(default=0, eq=False)

    @property
    def total(self) -> int:
        """The blocks hit in the whole stream."""
        return sum(self.hits)


class EvictionDigest:
    """Hashes the evictions of a cache in their order, as the watcher of its tree."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Do nothing: what is stored follows from the requests and the evictions."""

    def hit(self, span: Span, now: int) -> None:
        """Do nothing: hits are counted by the cache."""

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Hash the key of the first block that leaves, and how many do."""
        del now
        key = span.path_keys[(span.end - blocks) // span.geometry.ratio]
        self._hash.update(f"{key!r} {span.end} {blocks} {reason}\n".encode())

    def hexdigest(self) -> str:
        """Return the digest."""
        return self._hash.hexdigest()


def run_cell(cell: Cell, *, timed: bool = False) -> CellResult:
    """Replay the stream of a cell, serial and untimed; with `timed` serve it as well.

    Raises:
        PolicyError: the policy failed, or answered what it must not.
    """
    stream = read_stream(cell.stream)
    blocks, size = stream.pool(cell.share), stream.key_tokens
    cache = KVCache(blocks, size, eviction=cell.entry.build(), accounting="keys")
    digest = EvictionDigest()
    cache.tree.watcher = digest
    cost = default_prefill_cost()
    hits, saved = [0] * STRETCHES, []
    count = len(stream.requests)
    began = process_time_ns()
    hit_blocks = hits_of(stream.requests, cache)
    cpu_ns = process_time_ns() - began
    for index, blocks_hit in enumerate(hit_blocks):
        if blocks_hit:
            hits[index * STRETCHES // count] += blocks_hit
            saved.append(blocks_hit * size)
    return CellResult(
        blocks=blocks,
        lookups=cache.stats.lookup_blocks,
        hits=hits,
        saved_s=round(fsum(cost(0, tokens) for tokens in saved), 3),
        evicted=cache.tree.evicted_blocks,
        evictions=digest.hexdigest(),
        timed=_under_clock(cell.entry, stream, blocks) if timed else None,
        cpu_ns=cpu_ns,
    )


def _under_clock(entry: Entry, stream: Footprint, blocks: int) -> dict[str, int] | None:
    """Serve a stream on the default server; return its times; None if it rejects requests.

    A pool that is smaller than the longest request rejects it, so that times mean nothing.
    """
    longest = max(request.prompt_tokens + request.output_tokens for request in stream.requests)
    if blocks * stream.key_tokens < longest:
        return None
    cache = KVCache(blocks, stream.key_tokens, eviction=entry.build())
    result = simulate(stream.requests, cache=cache, residency=False)
    times = result.ttft
    if times is None:
        return None
    return {
        "mean_ttft_us": round(times.mean * 1e6),
        "p99_ttft_us": round(times.p99 * 1e6),
        "hit_tokens": cache.stats.hit_tokens,
    }
