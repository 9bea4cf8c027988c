"""The metrics of a server, under the names of vLLM's metrics where vLLM has the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from kvcore.cache import ServedCache
from kvcore.units import NS_PER_S
from kvcore_lab.report.prometheus import FIRST_TOKEN, LATENCY, LATER_TOKENS

if TYPE_CHECKING:
    from kvcore_online.engine import LiveLoop
    from kvcore_online.stored import StoredBlocks

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

TIMES: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one token of a request to the next.", LATER_TOKENS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", LATENCY),
    "request_queue_time_seconds": ("From arrival to admission.", LATENCY),
    "request_prefill_time_seconds": ("From admission to the first token.", LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", LATENCY),
}
"""The histograms of vLLM, each with its text and the upper bounds of its buckets (s)."""

Samples: TypeAlias = Mapping[str, float]
"""Values by what follows the name of a family: labels, after `_sum` for instance."""


Family: TypeAlias = tuple[str, str, str, Samples]
"""Name, type, text and samples of a family."""


class BucketCounts:
    """A histogram of times. One thread adds, and others may read.

    Args:
        bounds: upper bounds of the buckets, in seconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._bounds_ns = [round(bound * NS_PER_S) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._total_ns = 0

    def add(self, time_ns: int, count: int = 1) -> None:
        """Add a time in ns, as many times as `count`. O(log of the buckets)."""
        self._counts[bisect_left(self._bounds_ns, time_ns)] += count
        self._total_ns += time_ns * count

    def samples(self, labels: str) -> Samples:
        """Return the buckets, the sum and the count, as the text format has them."""
        *upto, count = accumulate(self._counts)
        buckets = zip((*map(str, self.bounds), "+Inf"), (*upto, count), strict=True)
        samples: dict[str, float] = {
            f'_bucket{{{labels},le="{bound}"}}': number for bound, number in buckets
        }
        total = self._total_ns / NS_PER_S
        return samples | {f"_sum{{{labels}}}": total, f"_count{{{labels}}}": count}


def server_metrics(
    loop: LiveLoop, cache: ServedCache, model: str, stored: StoredBlocks | None
) -> str:
    """Return the metrics in Prometheus' text format. Read while the engine runs: O(1)."""
    name = f'model_name="{_quoted(model)}"'
    families: list[Family] = [*_counts(loop, cache, name, stored), *_tiers(cache, name)]
    for family, (text, _) in TIMES.items():
        samples = loop.log.times[family].samples(name)
        families.append((f"vllm:{family}", HISTOGRAM, text, samples))
    lines = []
    for family, kind, text, samples in families:
        lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}"]
        lines += [f"{family}{labels} {number}" for labels, number in samples.items()]
    return "\n".join(lines) + "\n"


def _counts(
    loop: LiveLoop, cache: ServedCache, name: str, stored: StoredBlocks | None
) -> Iterator[Family]:
    """Yield what a server counts."""
    log, batcher, stats = loop.log, loop.batcher, cache.stats
    blocks = cache.pool.blocks
    used = (blocks - cache.available_blocks) / blocks
    ends = {f'{{{name},end="{end}"}}': number for end, number in log.requests.items()}
    yield "kvcore:requests_total", COUNTER, "Requests by how they ended.", ends
    dropped = 0 if stored is None else stored.dropped
    behind = max(loop.behind_ns, 0) / NS_PER_S if loop.paced and loop.open else 0.0
    for family, kind, text, value in (
        ("vllm:num_requests_running", GAUGE, "Running requests.", len(batcher.running)),
        ("vllm:num_requests_waiting", GAUGE, "Waiting requests.", len(batcher.waiting)),
        ("vllm:kv_cache_usage_perc", GAUGE, "Share of the blocks in use.", used),
        (
            "vllm:prefix_cache_queries_total",
            COUNTER,
            "Prompt tokens that were looked up.",
            stats.lookup_tokens,
        ),
        ("vllm:prefix_cache_hits_total", COUNTER, "Prompt tokens that hit.", stats.hit_tokens),
        ("vllm:prompt_tokens_total", COUNTER, "Prompt tokens served.", log.prompt_tokens),
        ("vllm:generation_tokens_total", COUNTER, "Tokens generated.", log.output_tokens),
        ("kvcore:kv_events_dropped_total", COUNTER, "KV events not published.", dropped),
        (
            "kvcore:behind_seconds",
            GAUGE,
            "How late steps of a simulation end: this machine is too slow for it.",
            behind,
        ),
    ):
        yield family, kind, text, {f"{{{name}}}": value}


def _tiers(cache: ServedCache, name: str) -> Iterator[Family]:
    """Yield lookups, hits and bytes of the tiers below the pool, under vLLM's names."""
    if cache.tiers is None:
        return
    queries: dict[str, float] = {}
    hits: dict[str, float] = {}
    moved: dict[str, float] = {}
    stats, size = cache.stats, cache.geometry.block_size
    missed = stats.lookup_tokens - stats.hit_tokens
    for tier in cache.tiers.as_dict():
        labels, loaded = f'{name},tier="{tier["tier"]}"', tier["hit_blocks"] * size
        queries[f"{{{labels}}}"], hits[f"{{{labels}}}"] = missed, loaded
        missed -= loaded
        for way, key in (("load", "read_bytes"), ("store", "written_bytes")):
            moved[f'{{{labels},transfer_type="{way}"}}'] = tier[key]
    text = "Prompt tokens that no nearer level held."
    yield "vllm:external_prefix_cache_queries_total", COUNTER, text, queries
    text = "Prompt tokens that were loaded from a tier."
    yield "vllm:external_prefix_cache_hits_total", COUNTER, text, hits
    yield "vllm:kv_offload_total_bytes_total", COUNTER, "Bytes moved.", moved


def _quoted(text: str) -> str:
    """Return a text with the characters escaped that may not stand in the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
