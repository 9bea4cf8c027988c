"""Results as Prometheus metrics, under the names that serving engines use.

The names are vLLM's (vllm/v1/metrics/loggers.py), with the prefix `kvcore_` in place of
`vllm:`: queries and dashboards of vLLM work with the other prefix. docs/reference/metrics.md
lists them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcore.lazy import import_extra
from kvcore_cli.report.tables import plugin_text

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvcore_lab.comparison import Comparison

Labels: TypeAlias = dict[str, str]

PREFIX = "kvcore_"

# Upper bounds of vLLM's buckets, in seconds, so that histograms of both can be added.
# fmt: off
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
LATER_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on

TIMES = {
    "ttft_s": ("time_to_first_token_seconds", FIRST_TOKEN),
    "tpot_s": ("request_time_per_output_token_seconds", LATER_TOKENS),
    "e2e_s": ("e2e_request_latency_seconds", LATENCY),
    "queue_s": ("request_queue_time_seconds", LATENCY),
}
"""The histogram of each column of times of requests, and the bounds of its buckets."""

RESTING = {
    "lifetime_s": "kv_block_lifetime_seconds",
    "age_at_eviction_s": "kv_block_idle_before_evict_seconds",
    "age_at_hit_s": "kv_block_reuse_gap_seconds",
    "hits_at_eviction": "kv_block_hits_before_evict",
}
"""The histogram of each figure of how long blocks stay."""

LOOKED_UP = {
    "lookup_tokens": "prefix_cache_queries",
    "hit_tokens": "prefix_cache_hits",
    "lookup_blocks": "prefix_cache_queried_blocks",
    "hit_blocks": "prefix_cache_hit_blocks",
}
"""The counter of each number of a prefix cache."""

HELP = {
    "e2e_request_latency_seconds": "From arrival to finish.",
    "external_prefix_cache_hits": "Those of them that were loaded.",
    "external_prefix_cache_queries": "Prompt tokens that no nearer level held.",
    "generation_tokens": "Of completed requests.",
    "kv_block_hits_before_evict": "How many other requests had hit a block when it left.",
    "kv_block_idle_before_evict_seconds": "From the last access of a block to its eviction.",
    "kv_block_lifetime_seconds": "From storing a block to its eviction.",
    "kv_block_reuse_gap_seconds": (
        "From the last access of a block to a hit by another request."
    ),
    "kv_blocks_evicted": "Blocks that left, by why.",
    "kv_blocks_restored": "Those of them that had been evicted within a pool of evictions.",
    "kv_blocks_stored": "Blocks that entered the cache.",
    "kv_cache_thrashing": "1 if the cache brings back what it has just evicted, else 0.",
    "kv_cache_usage_perc": (
        "Share of the pool that requests hold, over the time of the run; at most 1."
    ),
    "kv_offload_dropped_blocks": "Blocks that left.",
    "kv_offload_total_bytes": "Bytes moved.",
    "kv_offload_total_time": (
        "Seconds that loads took, those spent waiting for the link among them."
    ),
    "kv_offload_usage_perc": "Share of the slots that are in use at the end.",
    "num_preemptions": "Preemptions.",
    "num_requests_running": "Requests admitted and not finished, mean over time.",
    "num_requests_waiting": "Requests not admitted yet, mean over time.",
    "prefix_cache_hit_blocks": "Blocks that hit.",
    "prefix_cache_hits": "Prompt tokens that hit.",
    "prefix_cache_queried_blocks": "Blocks looked up.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prompt_tokens": "Of completed requests.",
    "replica_busy": "Share of the time of the run in which it ran steps.",
    "replica_failures": "Times it failed.",
    "replica_requests": "Requests that a replica has served.",
    "request_queue_time_seconds": "From arrival to admission.",
    "request_success": "Requests by how they ended; `abort`: rejected.",
    "request_time_per_output_token_seconds": (
        "Mean time of a request's tokens after the first."
    ),
    "time_to_first_token_seconds": "From arrival to the first token.",
}
"""What each metric is, as a dashboard shows it."""


def run_metrics(document: Mapping[str, Any], requests: Mapping[str, Sequence[Any]]) -> str:
    """Return the metrics of a run in Prometheus' text format.

    `document` is the summary of the run with its `config`, as `kvcore simulate --json` prints
    it; `requests` are the columns of its requests (`Result.requests`).

    Raises:
        PluginError: the package prometheus_client is not installed.
    """
    families, config = _Families(), document["config"]
    if "replicas" in document:
        _add_replicas(families, document)
        labels = {**_of_cluster(config), "model_name": config["model"]}
        _add_ends(families, document, labels)
        _add_requests(families, requests, document["simulated_s"], labels)
        return families.exposition()
    pool, eviction = document["pool"], config["plugins"]["eviction"]
    labels = {
        "workload": config["workload"]["name"],
        "policy": plugin_text(eviction["name"], eviction["options"]),
        "blocks": str(pool["blocks"]),
        "scheduler": config["plugins"]["scheduler"]["name"],
        "model_name": config["model"],
    }
    _add_lookups(families, document["hit"], labels)
    _add_residency(families, document["residency"], labels)
    _add_tiers(families, document, labels)
    for stat in ("mean", "peak"):
        blocks = pool["active"][stat]
        if blocks is not None:
            about = labels | {"stat": stat}
            families.gauge("kv_cache_usage_perc", blocks / pool["blocks"], about)
    _add_ends(families, document, labels)
    _add_requests(families, requests, document["simulated_s"], labels)
    return families.exposition()


def _of_cluster(config: Mapping[str, Any]) -> Labels:
    """Return the labels of counts over all replicas of a cluster."""
    router = config["plugins"]["router"]
    routed_by = plugin_text(router["name"], router["options"])
    return {"workload": config["workload"]["name"], "router": routed_by}


def _add_replicas(families: _Families, document: Mapping[str, Any]) -> None:
    """Add the lookups, hits, requests, failures and busy time of each replica of a cluster."""
    for replica in document["replicas"]:
        labels = _of_cluster(document["config"]) | {"replica": str(replica["replica"])}
        _add_lookups(families, replica["hit"], labels)
        families.counter("replica_requests", replica["requests"], labels)
        families.counter("replica_failures", replica["failures"], labels)
        if replica["busy"] is not None:
            families.gauge("replica_busy", replica["busy"], labels)


def comparison_metrics(comparison: Comparison) -> str:
    """Return the metrics of a comparison in Prometheus' text format, one label set per row.

    Raises:
        PluginError: the package prometheus_client is not installed.
    """
    families = _Families()
    for row in comparison.rows:
        labels = {
            "workload": comparison.workload.name,
            "policy": plugin_text(row.eviction, row.options),
            "blocks": str(row.blocks),
        }
        hit = {"lookup_blocks": row.lookup_blocks, "hit_blocks": row.hit_blocks}
        _add_lookups(families, hit, labels)
        _add_residency(families, row.residency, labels)
    return families.exposition()


def require_prometheus() -> Any:
    """Import prometheus_client, and return it.

    Raises:
        PluginError: the package prometheus_client is not installed.
    """
    return import_extra("prometheus_client", "metrics need prometheus_client", "prometheus")


class _Families:
    """Collector of metric families in the order of their first samples."""

    def __init__(self) -> None:
        self._client = require_prometheus()
        self._metrics: dict[str, Metric] = {}

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._metrics.values()

    def exposition(self) -> str:
        """Return the families in text format."""
        text: bytes = self._client.generate_latest(self)
        return text.decode()

    def counter(self, name: str, value: float, labels: Labels) -> None:
        """Add a sample of a counter."""
        self._family("counter", name).add_sample(f"{PREFIX}{name}_total", labels, value)

    def gauge(self, name: str, value: float, labels: Labels) -> None:
        """Add a sample of a gauge."""
        self._family("gauge", name).add_sample(f"{PREFIX}{name}", labels, value)

    def histogram(
        self,
        name: str,
        buckets: Iterable[tuple[float, int]],
        count: int,
        total: float,
        labels: Labels,
    ) -> None:
        """Add a histogram; `buckets` are upper bounds with cumulative counts."""
        family, full = self._family("histogram", name), f"{PREFIX}{name}"
        for bound, upto in buckets:
            family.add_sample(f"{full}_bucket", labels | {"le": str(bound)}, upto)
        family.add_sample(f"{full}_bucket", labels | {"le": "+Inf"}, count)
        family.add_sample(f"{full}_count", labels, count)
        family.add_sample(f"{full}_sum", labels, total)

    def _family(self, kind: str, name: str) -> Metric:
        if name not in self._metrics:
            self._metrics[name] = self._client.Metric(f"{PREFIX}{name}", HELP[name], kind)
        return self._metrics[name]


def _add_lookups(families: _Families, hit: Mapping[str, Any], labels: Labels) -> None:
    """Add lookups and hits in blocks, and in tokens if they are known."""
    for part, name in LOOKED_UP.items():
        if part in hit:
            families.counter(name, hit[part], labels)


def _add_tiers(families: _Families, document: Mapping[str, Any], labels: Labels) -> None:
    """Add the lookups, hits, transfers and drops of each tier below the pool."""
    size = document["pool"]["block_size"]
    missed = document["hit"]["lookup_tokens"] - document["hit"]["hit_tokens"]
    for tier in document.get("tiers") or ():
        about, hits = labels | {"tier": tier["tier"]}, tier["hit_blocks"] * size
        families.counter("external_prefix_cache_queries", missed, about)
        families.counter("external_prefix_cache_hits", hits, about)
        missed -= hits
        for direction, key in (("load", "read_bytes"), ("store", "written_bytes")):
            moved = about | {"transfer_type": direction}
            families.counter("kv_offload_total_bytes", tier[key], moved)
        moved = about | {"transfer_type": "load"}
        families.counter("kv_offload_total_time", tier["load_s"], moved)
        for reason, blocks in tier["dropped_blocks"].items():
            families.counter("kv_offload_dropped_blocks", blocks, about | {"reason": reason})
        families.gauge("kv_offload_usage_perc", tier["used_blocks"] / tier["slots"], about)


def _add_residency(
    families: _Families, residency: Mapping[str, Any] | None, labels: Labels
) -> None:
    """Add the residency histograms of each tier, and its stored and evicted blocks."""
    for tier, rested in (residency or {}).items():
        about = labels | {"tier": tier}
        for key, name in RESTING.items():
            seen = rested[key]
            if seen is not None:
                buckets = [(float(bound), upto) for bound, upto in seen["buckets"].items()]
                families.histogram(name, buckets, seen["blocks"], seen["sum"], about)
        for reason, blocks in rested["evicted_blocks"].items():
            families.counter("kv_blocks_evicted", blocks, about | {"reason": reason})
        families.counter("kv_blocks_stored", rested["stored_blocks"], about)
        families.counter("kv_blocks_restored", rested["restored_blocks"], about)
        families.gauge("kv_cache_thrashing", int(rested["thrashing"]), about)


def _add_ends(families: _Families, document: Mapping[str, Any], labels: Labels) -> None:
    """Add the requests by status, and the preemptions."""
    families.counter("num_preemptions", sum(document["preemptions"].values()), labels)
    for reason, key in (("length", "completed"), ("abort", "rejected")):
        families.counter("request_success", document[key], labels | {"finished_reason": reason})


def _add_requests(
    families: _Families, requests: Mapping[str, Sequence[Any]], seconds: float, labels: Labels
) -> None:
    """Add tokens and times of requests and, by Little's law, the mean numbers in the system."""
    names = ("status", "prompt", "output", "admitted_s", "finish_s")
    rows = zip(*(requests[name] for name in names), strict=True)
    done = [row[1:] for row in rows if row[0] == "finished"]
    prompts, outputs = sum(row[0] for row in done), sum(row[1] for row in done)
    families.counter("prompt_tokens", prompts, labels)
    families.counter("generation_tokens", outputs, labels)
    if seconds:
        about = labels | {"stat": "mean"}
        served = sum(end - begin for _, _, begin, end in done)
        queued = sum(time for time in requests["queue_s"] if time is not None)
        families.gauge("num_requests_running", served / seconds, about)
        families.gauge("num_requests_waiting", queued / seconds, about)
    for column, (name, bounds) in TIMES.items():
        times = sorted(time for time in requests[column] if time is not None)
        buckets = [(bound, bisect_right(times, bound)) for bound in bounds]
        families.histogram(name, buckets, len(times), sum(times), labels)
