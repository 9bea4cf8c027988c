"""Prometheus metrics: their values, as Prometheus' own parser reads them, equal the JSON's."""

from __future__ import annotations

import sys

import pytest
from helpers.serving import BLOCK, Even, ask
from prometheus_client.parser import text_string_to_metric_families

from kvcore import KVCache, PluginError, simulate
from kvcore.serving import Batching
from kvcore_lab.comparison import compare_policies
from kvcore_lab.report.prometheus import comparison_metrics, run_metrics
from kvcore_plugins.eviction import LFU, LRU
from kvcore_plugins.workload import Zipf

CONFIG = {
    "workload": {"name": 'a "trace"'},
    "model": "llama-3.1-8b",
    "plugins": {
        "eviction": {"name": "lfu", "options": {"half_life": 300.0, "decay": None}},
        "scheduler": {"name": "fcfs", "options": {}},
    },
}
RESTING = {
    "kvcore_kv_block_lifetime_seconds": "lifetime_s",
    "kvcore_kv_block_idle_before_evict_seconds": "age_at_eviction_s",
    "kvcore_kv_block_reuse_gap_seconds": "age_at_hit_s",
    "kvcore_kv_block_hits_before_evict": "hits_at_eviction",
}
TIMES = {
    "kvcore_time_to_first_token_seconds": "ttft_s",
    "kvcore_request_time_per_output_token_seconds": "tpot_s",
    "kvcore_e2e_request_latency_seconds": "e2e_s",
    "kvcore_request_queue_time_seconds": "queue_s",
}


@pytest.fixture(scope="module")
def run():
    """Return a run that hits, evicts and rejects: its result, its document and its samples."""
    zipf = Zipf(requests=120, prefixes=12, rate=1e6, key_tokens=BLOCK)
    workload = [*zipf, ask("huge", at=10**9, prompt=10_000)]
    cache = KVCache(1500, BLOCK, eviction=LFU(), key_tokens=BLOCK)
    result = simulate(workload, cache=cache, latency=Even(), batching=Batching(max_seqs=4))
    document = result.summary() | {"config": CONFIG}
    return result, document, parsed(run_metrics(document, result.requests))


def parsed(text):
    """Return the samples of `text` by name, each as (labels, value)."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def only(samples, name, **labels):
    """Return the value of the only sample with `labels`."""
    (value,) = [v for has, v in samples[name] if labels.items() <= has.items()]
    return value


def buckets(samples, name, **labels):
    """Return the buckets of a histogram by upper bound."""
    return {
        float(has["le"]): value
        for has, value in samples[f"{name}_bucket"]
        if labels.items() <= has.items()
    }


@pytest.mark.parametrize("name", RESTING)
def test_histograms_of_blocks_equal_the_json(run, name):
    """Histograms of blocks have the count, the sum and the buckets of the JSON."""
    _, document, samples = run
    summary = document["residency"]["gpu"][RESTING[name]]
    assert only(samples, f"{name}_count") == summary["blocks"] > 0
    assert only(samples, f"{name}_sum") == summary["sum"]
    expected = {float(bound): upto for bound, upto in summary["buckets"].items()}
    assert buckets(samples, name) == expected | {float("inf"): summary["blocks"]}


@pytest.mark.parametrize("name", TIMES)
def test_histograms_of_times_count_the_requests(run, name):
    """Histograms of times have the mean of the JSON, and buckets that count the requests."""
    result, document, samples = run
    times = [time for time in result.requests[TIMES[name]] if time is not None]
    count = only(samples, f"{name}_count")
    assert count == len(times) > 0
    mean = only(samples, f"{name}_sum") / count
    assert mean == pytest.approx(document[TIMES[name]]["mean"])
    for bound, upto in buckets(samples, name).items():
        assert upto == sum(time <= bound for time in times)


def test_counters_equal_the_json(run):
    """Counters of tokens, blocks, preemptions and requests equal those of the JSON."""
    _, document, samples = run
    hit, rested = document["hit"], document["residency"]["gpu"]
    for name, value in {
        "prefix_cache_queries": hit["lookup_tokens"],
        "prefix_cache_hits": hit["hit_tokens"],
        "prefix_cache_queried_blocks": hit["lookup_blocks"],
        "prefix_cache_hit_blocks": hit["hit_blocks"],
        "num_preemptions": sum(document["preemptions"].values()),
        "kv_blocks_stored": rested["stored_blocks"],
        "kv_blocks_restored": rested["restored_blocks"],
    }.items():
        assert only(samples, f"kvcore_{name}_total") == value, name
    for reason, key in (("length", "completed"), ("abort", "rejected")):
        ended = only(samples, "kvcore_request_success_total", finished_reason=reason)
        assert ended == document[key]
    for reason, blocks in rested["evicted_blocks"].items():
        assert only(samples, "kvcore_kv_blocks_evicted_total", reason=reason) == blocks


def test_gauges_are_means_over_the_run(run):
    """Gauges show the usage of the pool, and running and waiting requests by Little's law."""
    _, document, samples = run
    pool, seconds = document["pool"], document["simulated_s"]
    for stat in ("mean", "peak"):
        used = only(samples, "kvcore_kv_cache_usage_perc", stat=stat)
        assert used == pool["active"][stat] / pool["blocks"]
    served, waited = (
        document["completed"] * mean / seconds
        for mean in (
            document["e2e_s"]["mean"] - document["queue_s"]["mean"],
            document["queue_s"]["mean"],
        )
    )
    assert only(samples, "kvcore_num_requests_running") == pytest.approx(served)
    assert only(samples, "kvcore_num_requests_waiting") == pytest.approx(waited)
    thrashing = document["residency"]["gpu"]["thrashing"]
    assert only(samples, "kvcore_kv_cache_thrashing") == int(thrashing)


def test_labels_name_workload_policy_and_options(run):
    """Labels name workload, policy and options, even if a name contains quotes."""
    labels, _ = run[2]["kvcore_kv_block_lifetime_seconds_sum"][0]
    assert labels == {
        "workload": 'a "trace"',
        "policy": "lfu:half_life=300.0",
        "blocks": "1500",
        "scheduler": "fcfs",
        "model_name": "llama-3.1-8b",
        "tier": "gpu",
    }


def test_every_row_of_a_comparison_has_labels():
    """Metrics of a comparison are labelled by policy with options and by pool size."""
    policies = [LRU, lambda: LFU(half_life=2), lambda: LFU(half_life=9)]
    comparison = compare_policies(Zipf(requests=80), policies, [40, 90], residency=True)
    samples = parsed(comparison_metrics(comparison))
    assert len(samples["kvcore_prefix_cache_hit_blocks_total"]) == 6
    for row in comparison.rows:
        unit = f":half_life={row.options['half_life']},unit=s" if row.options else ""
        labels = {"policy": f"{row.eviction}{unit}", "blocks": str(row.blocks)}
        hits = only(samples, "kvcore_prefix_cache_hit_blocks_total", **labels)
        assert hits == row.hit_blocks
        gone = only(samples, "kvcore_kv_block_lifetime_seconds_count", tier="gpu", **labels)
        assert gone == row.evicted_blocks


def test_without_prometheus_client_the_error_gives_the_install_command(monkeypatch):
    """Without prometheus_client the error gives the install command."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    comparison = compare_policies(Zipf(requests=5), LRU, 10)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[prometheus\]'"):
        comparison_metrics(comparison)
