"""The metrics of a server, named as vLLM names its own where it has them."""

from __future__ import annotations

from kvcore.cache import KVCache
from kvcore.online.engine import LiveLoop
from kvcore.online.stored import StoredBlocks
from kvcore.units import NS_PER_S


def server_metrics(
    loop: LiveLoop, cache: KVCache, model: str, stored: StoredBlocks | None
) -> str:
    """Return the metrics in Prometheus' text format. Read while the engine runs: O(1)."""
    log, batcher = loop.log, loop.batcher
    blocks, stats = cache.pool.blocks, cache.stats
    label = f'{{model_name="{_quoted(model)}"}}'
    lines: list[str] = []

    def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{labels} {value}" for labels, value in samples)

    add(
        "vllm:num_requests_running",
        "gauge",
        "Requests that run.",
        (label, len(batcher.running)),
    )
    add(
        "vllm:num_requests_waiting",
        "gauge",
        "Requests that wait.",
        (label, len(batcher.waiting)),
    )
    used = (blocks - cache.available_blocks) / blocks
    add("vllm:kv_cache_usage_perc", "gauge", "Share of the blocks in use.", (label, used))
    add(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prompt tokens that were looked up.",
        (label, stats.lookup_tokens),
    )
    add(
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prompt tokens that hit.",
        (label, stats.hit_tokens),
    )
    add(
        "kvcore:requests_total",
        "counter",
        "Requests that have ended, by how.",
        *(
            (f'{{model_name="{_quoted(model)}",end="{end}"}}', number)
            for end, number in log.requests.items()
        ),
    )
    add(
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens served.",
        (label, log.prompt_tokens),
    )
    add(
        "vllm:generation_tokens_total",
        "counter",
        "Tokens generated.",
        (label, log.output_tokens),
    )
    add(
        "kvcore:ttft_seconds_total",
        "counter",
        "Times to first token of finished requests, in sum.",
        (label, log.ttft_ns / NS_PER_S),
    )
    add(
        "kvcore:request_seconds_total",
        "counter",
        "Times from arrival to end of finished requests, in sum.",
        (label, log.e2e_ns / NS_PER_S),
    )
    dropped = 0 if stored is None else stored.dropped
    add(
        "kvcore:kv_events_dropped_total",
        "counter",
        "KV events not published.",
        (label, dropped),
    )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text as the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
