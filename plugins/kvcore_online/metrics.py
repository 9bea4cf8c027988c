"""The metrics of a server, under the names of vLLM's metrics where vLLM has the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from kvcore.cache.served import ServedCache, held_blocks
from kvcore.units import NS_PER_S
from kvcore_online.engine import LiveLoop
from kvcore_online.stored import StoredBlocks
from kvcore_online.tally import TIMES, Samples

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

Family: TypeAlias = tuple[str, str, str, Samples]
"""Name, type, text and samples of a family."""


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
    used = held_blocks(cache) / cache.pool.blocks
    ends = {f'{{{name},end="{end}"}}': number for end, number in log.requests.items()}
    yield "kvcore:requests_total", COUNTER, "Requests by how they ended.", ends
    dropped = 0 if stored is None else stored.dropped
    waiting = len(batcher.waiting) + len(loop.listeners)  # which come in during a step
    behind = max(loop.behind_ns, 0) / NS_PER_S if loop.paced and not loop.idle else 0.0
    for family, kind, text, value in (
        ("vllm:num_requests_running", GAUGE, "Running requests.", len(batcher.running)),
        ("vllm:num_requests_waiting", GAUGE, "Waiting requests.", waiting),
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
