"""The metrics of a server, under the names of vLLM's metrics where vLLM has the same."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.cache import KVCache
from kvcore.units import NS_PER_S
from kvcore_online.engine import LiveLoop
from kvcore_online.stored import StoredBlocks

GAUGE, COUNTER = "gauge", "counter"


def server_metrics(
    loop: LiveLoop, cache: KVCache, model: str, stored: StoredBlocks | None
) -> str:
    """Return the metrics in Prometheus' text format. Read while the engine runs: O(1)."""
    log, batcher, stats = loop.log, loop.batcher, cache.stats
    blocks = cache.pool.blocks
    used = (blocks - cache.available_blocks) / blocks
    dropped = 0 if stored is None else stored.dropped
    name = f'model_name="{_quoted(model)}"'
    ends = {f'{name},end="{end}"': number for end, number in log.requests.items()}
    families: list[tuple[str, str, str, float | Mapping[str, float]]] = [
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
        ("kvcore:requests_total", COUNTER, "Requests by how they ended.", ends),
        ("vllm:prompt_tokens_total", COUNTER, "Prompt tokens served.", log.prompt_tokens),
        ("vllm:generation_tokens_total", COUNTER, "Tokens generated.", log.output_tokens),
        (
            "kvcore:ttft_seconds_total",
            COUNTER,
            "Sum of the times to first token of finished requests.",
            log.ttft_ns / NS_PER_S,
        ),
        (
            "kvcore:request_seconds_total",
            COUNTER,
            "Sum of the times from arrival to end of finished requests.",
            log.e2e_ns / NS_PER_S,
        ),
        ("kvcore:kv_events_dropped_total", COUNTER, "KV events not published.", dropped),
    ]
    lines = []
    for family, kind, text, value in families:
        lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}"]
        samples = value if isinstance(value, Mapping) else {name: value}
        lines += [f"{family}{{{labels}}} {number}" for labels, number in samples.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text with the characters escaped that may not stand in the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
