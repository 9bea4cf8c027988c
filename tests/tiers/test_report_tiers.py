"""Tiers in the summary, the report, the metrics and the residency of a run."""

from __future__ import annotations

import attrs
import pytest
from helpers.configs import CONFIG
from helpers.serving import BLOCK, Even, ask
from prometheus_client.parser import text_string_to_metric_families

from kvcore import KVCache, simulate
from kvcore.serving import Batching
from kvcore_cli.report.simulation import SimulationReport, thrashing
from kvcore_lab.report.prometheus import run_metrics
from kvcore_tiers.hierarchy import Tiers
from kvcore_tiers.level import TierStats

SLOT = 1000
"""Bytes of a block."""

HOST = f"host:memory={20 * SLOT},load=always,latency=0,read_bandwidth=1e15,write_bandwidth=1e15"
NVME = f"disk:memory={40 * SLOT},load=never"


def served(*tiers, max_seqs=1):
    """Serve two prompts of 4 blocks in turn, of which the pool of 4 blocks holds one.

    The prompts are a, b, a: their first three blocks can hit, and the second a finds them in a
    tier.
    """
    cache = KVCache(4, BLOCK, accounting="tokens", key_tokens=BLOCK)
    if tiers:
        Tiers(cache, tiers, SLOT)
    requests = [
        ask(
            name + str(index),
            at=index * 10**6,
            prompt=4 * BLOCK,
            keys=[name + k for k in "0123"],
        )
        for index, name in enumerate("aba")
    ]
    return simulate(requests, cache=cache, latency=Even(), batching=Batching(max_seqs=max_seqs))


def test_hits_are_counted_by_tier():
    """Hits are counted by tier and by block, token and request.

    `reuse_ratio` is that of the pool and all tiers together.
    """
    summary = served(HOST).summary()
    (host,) = summary["tiers"]
    assert (host["hit_blocks"], host["loads"], host["found_blocks"]) == (3, 1, 3)
    assert summary["hit"]["hit_blocks"] == 0
    assert host["ratio"] == {"block": 3 / 12, "token": 12 / 48, "request": 3 / 4 / 3}
    assert summary["reuse_ratio"] == host["ratio"]
    assert summary["loaded_tokens"] == 12


def test_without_tiers_there_are_no_figures_of_tiers():
    """Without tiers, neither the summary nor the report has figures of tiers."""
    summary = served().summary()
    assert (summary["tiers"], summary["loaded_tokens"]) == (None, 0)
    assert summary["reuse_ratio"] == summary["hit"]["ratio"]
    report = SimulationReport(summary, CONFIG)
    assert report.tiers == []
    assert not any("swapped" in amount or "tier" in name for name, amount in report.amounts)


def test_the_figures_of_a_tier_are_those_of_its_slots_traffic_and_link():
    """The JSON object of a tier has all its counts, by name, and its times in seconds."""
    tiers = Tiers(KVCache(4, BLOCK), [HOST], SLOT)
    (level,) = tiers.levels
    counts = {
        field.name: 10**9 * n
        for n, field in enumerate(attrs.fields(TierStats), 1)
        if field.name not in ("dropped", "ratio_sum")
    }
    level.stats = TierStats(**counts, dropped={"capacity": 3})
    level.link.busy_ns, level.link.read_bytes, level.link.written_bytes = 10**9, 5, 7
    level.pool.allocate(6)
    (figures,) = tiers.as_dict()
    assert figures.pop("ratio") == tiers.hit_stats(level).ratios()
    assert figures == {
        "tier": "host", "slots": 20, "memory_bytes": 20 * SLOT, "used_blocks": 6,
        "hit_blocks": counts["hits"], "prefetch_hit_blocks": counts["prefetch_hits"],
        **{
            f"{name}_blocks": counts[name]
            for name in counts
            if name not in ("hits", "prefetch_hits", "loads", "errors", "wait_ns", "load_ns")
        },
        "loads": counts["loads"], "errors": counts["errors"], "dropped_blocks": {"capacity": 3},
        "read_bytes": 5, "written_bytes": 7, "link_busy_s": 1.0,
        "load_s": counts["load_ns"] / 1e9, "load_wait_s": counts["wait_ns"] / 1e9,
    }  # fmt: skip


def test_a_return_after_preemption_is_no_hit_of_a_tier():
    """Blocks that a preempted request loads again are no hits of the tier."""
    cache = KVCache(6, BLOCK, accounting="tokens", key_tokens=BLOCK)
    Tiers(cache, [HOST], SLOT)
    requests = [
        ask(name, prompt=2 * BLOCK, output=12, keys=[name + k for k in "01"]) for name in "ab"
    ]
    summary = simulate(requests, cache=cache, latency=Even()).summary()
    (host,) = summary["tiers"]
    assert summary["preemptions"]["swap"] >= 1
    assert host["loaded_blocks"] > 0
    assert (host["hit_blocks"], summary["loaded_tokens"]) == (0, 0)


def test_the_report_has_a_column_for_each_tier():
    """The report has a column per tier, with mean times of its loads.

    A load waits for the write of the blocks that it displaces.
    """
    report = SimulationReport(served(HOST, NVME).summary(), CONFIG)
    rows = {name: cells for name, *cells in report.tiers}
    assert rows["memory"] == ["19.5 KiB, 40.0% full", "39.1 KiB, 0.0% full"]
    assert rows["hits"][0] == "25.0% of tokens, 25.0% a request"
    assert rows["loaded"] == ["3 in 1 load", "0 in 0 loads"]
    assert rows["not stored"][0] == "0 link busy, 0 no room"
    assert rows["dropped"][0] == "0 for room"
    assert rows["a load takes"] == ["2 ns, 1 ns of it waiting", "–"]
    assert dict(report.amounts)["and with tiers"] == "25.0% of tokens, 25.0% a request"
    assert dict(report.amounts)["preemptions"] == "0 paused, 0 recomputed, 0 swapped"


def test_residency_is_reported_by_tier():
    """Residency is reported by tier: loaded blocks hit in the tier that they come from."""
    summary = served(HOST).summary()
    assert list(summary["residency"]) == ["gpu", "host"]
    host = summary["residency"]["host"]
    assert (host["stored_blocks"], host["age_at_hit_s"]["blocks"]) == (8, 3)
    rows = [name for name, *_ in SimulationReport(summary, CONFIG).resting]
    assert "host: since last use, at a hit" in rows


def test_the_warning_of_a_thrashing_tier_advises_more_memory():
    """The warning of a thrashing tier advises more memory of that tier."""
    rested = {
        "thrashing": True,
        "evicted_blocks": {"capacity": 900, "expired": 100},
        "never_hit_blocks": 750,
        "restored_blocks": 1200,
        "age_at_hit_s": {"blocks": 30},
    }
    host = {"tier": "host", "slots": 500, "memory_bytes": 2**30}
    text = thrashing({"host": rested}, 64, [host])
    assert "THRASHING (host)" in text
    assert "before another 500 had gone" in text
    assert "Twice its memory (2 GiB) would keep" in text


def test_metrics_have_a_sample_for_each_tier():
    """Metrics have a sample per tier, as vLLM counts external caches.

    Queries of a tier are the tokens that no nearer level holds.
    """
    result = served(HOST, NVME)
    config = CONFIG | {"workload": {"name": "mine"}}
    text = run_metrics(result.summary() | {"config": config}, result.requests)
    samples = {
        (sample.name, sample.labels.get("tier"), sample.labels.get("transfer_type")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, tier, way, value in (
        ("external_prefix_cache_queries_total", "host", None, 48),
        ("external_prefix_cache_hits_total", "host", None, 12),
        ("external_prefix_cache_queries_total", "disk", None, 36),
        ("external_prefix_cache_hits_total", "disk", None, 0),
        ("kv_offload_total_bytes_total", "host", "load", 3 * SLOT),
        ("kv_offload_total_bytes_total", "host", "store", 8 * SLOT),
        ("kv_offload_usage_perc", "host", None, 0.4),
    ):
        found = samples[f"kvcore_{name}", tier, way].value
        assert found == pytest.approx(value), (name, tier)
