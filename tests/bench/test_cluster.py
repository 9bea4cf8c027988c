"""Simulated clusters against separate runs of their replicas, against Dynamo, and at scale."""

from __future__ import annotations

import sys
from time import process_time
from typing import Any

import orjson
import pytest
from bench.harness import (
    KEY_TOKENS,
    POOL_TOKENS,
    bundled,
    dynamo_version,
    measured,
    medians,
    peer_command,
    peer_rows,
)

from kvcore import KVCache
from kvcore.cache import Recorder
from kvcore.serving import Batching, simulate
from kvcore_cluster.router import RoundRobin
from kvcore_cluster.simulate import simulate_cluster
from kvcore_cluster.views import parse_view
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Roofline
from kvcore_plugins.scheduler import FCFS
from kvcore_plugins.workload import Mooncake

REPLICAS = 8
APART_PROMISED = 1.3

# Arguments: replicas, requests, router. The pools are small and soon full.
LARGE = """
import resource, sys
from kvcore_cluster.simulate import simulate_cluster
from kvcore.config import RunConfig
from kvcore_cluster.config import ClusterParts
from kvcore_plugins.workload import Zipf
replicas, requests = int(sys.argv[1]), int(sys.argv[2])
workload = Zipf(requests=requests, rate=4.0 * replicas, prefixes=20_000, key_tokens=256)
config = RunConfig(
    "simulate", workload="zipf", replicas=replicas, router=sys.argv[3], block_size=256,
    blocks=1_000,
)
parts = ClusterParts(config, workload=workload)
result = simulate_cluster(workload, **parts.cluster(), residency=False)
print(sum(result.served))
"""


def _parts(_: Recorder | None = None) -> dict[str, Any]:
    """Return the parts of a replica that `simulate` uses by default."""
    cache = KVCache(
        POOL_TOKENS // KEY_TOKENS,
        KEY_TOKENS,
        eviction=LRU(),
        accounting="tokens",
        key_tokens=KEY_TOKENS,
        ids=False,
    )
    return {
        "cache": cache,
        "scheduler": FCFS(),
        "latency": Roofline(),
        "batching": Batching(),
    }


def test_eight_replicas_cost_little_more_than_separate_runs():
    """Eight replicas take at most 1.3 times the CPU time of eight separate runs.

    Each separate run serves the requests of one replica.
    """
    requests = bundled()
    shares = [requests[index::REPLICAS] for index in range(REPLICAS)]

    steps = set()

    def together() -> float:
        start = process_time()
        done = simulate_cluster(
            requests, [_parts] * REPLICAS, RoundRobin(), parse_view("index"), residency=False
        )
        steps.add(done.log.steps)
        return process_time() - start

    def apart() -> float:
        start = process_time()
        done = [simulate(share, residency=False, **_parts()) for share in shares]
        steps.add(sum(each.log.steps for each in done))
        return process_time() - start

    times = [(together(), apart()) for _ in range(5)]
    cluster, separate = map(min, zip(*times, strict=True))
    print(f"\n8 replicas {cluster:.2f} s, 8 runs {separate:.2f} s: {cluster / separate:.2f} x")
    assert len(steps) == 1
    assert cluster / separate <= APART_PROMISED


@pytest.mark.parametrize(("block_size", "promised", "runs"), [(512, 3, 3), (16, 4, 1)])
def test_eight_replicas_are_faster_than_dynamo(block_size, promised, runs, tmp_path):
    """A process with eight replicas is at least `promised` times as fast as Dynamo's.

    Both route by Dynamo's algorithm, here with events without delay, and complete equally many
    requests.
    """
    version = dynamo_version()
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_bytes(b"".join(peer_rows(Mooncake())))
    command = [
        *(sys.executable, "-m", "kvcore", "simulate", "mooncake", "--json", "--no-residency"),
        *("--blocks", str(POOL_TOKENS // block_size), "--block-size", str(block_size)),
        *("--replicas", str(REPLICAS), "--router", "dynamo", "--view", "events:delay=0"),
    ]
    peer = peer_command(trace, report, block_size, REPLICAS, "kv_router")
    found: dict[str, dict[str, Any]] = {}
    cpu: dict[str, list[float]] = {"kvcore": [], "dynamo": []}

    def kvcore_process() -> float:
        result = measured(*command)
        found["kvcore"] = orjson.loads(result.output)
        cpu["kvcore"].append(result.cpu)
        return result.seconds

    def dynamo_process() -> float:
        result = measured(*peer)
        found["dynamo"] = orjson.loads(report.read_bytes())
        cpu["dynamo"].append(result.cpu)
        return result.seconds

    ours, theirs = medians(runs, kvcore_process, dynamo_process)
    print(
        f"\nblock {block_size}, 8 workers: ai-dynamo {version} {theirs:.2f} s, kvcore "
        f"{ours:.2f} s: {theirs / ours:.1f} x (promised {promised}), of CPU time "
        f"{min(cpu['dynamo']) / min(cpu['kvcore']):.1f} x\n  hit ratios: "
        f"{found['dynamo']['prefix_cache_reused_ratio']:.3f}, {found['kvcore']['hit']['ratio']}"
    )
    assert found["kvcore"]["completed"] == found["dynamo"]["completed_requests"]
    assert theirs / ours >= promised


@pytest.mark.parametrize("router", ["round-robin", "power-of-two", "session"])
def test_a_thousand_replicas_take_linear_time(router):
    """A million requests take at most 1.2 times as long per request as a quarter of them.

    The time is CPU time, and the peak memory is less than 1.5 GB.
    """
    quarter, million = (
        measured(sys.executable, "-c", LARGE, "1000", str(requests), router)
        for requests in (250_000, 1_000_000)
    )
    growth = million.cpu / quarter.cpu
    print(
        f"\n{router}, 250 k requests: {quarter.cpu:.0f} s of CPU, {quarter.peak_mb:.0f} MB; "
        f"1 M: {million.cpu:.0f} s, {million.peak_mb:.0f} MB; {growth:.2f} x the time"
    )
    assert int(million.output) == 1_000_000
    assert growth <= 4 * 1.2
    assert million.peak_mb < 1_500
