"""`hazard` beside LRU, others and the optimum on what it was tuned on: hits, clock, and costs.

KVCORE_WEKA is the path of the sessions that it was tuned on. Hits are multiples of those of LRU
in a serial replay. All other workloads are a panel of the leaderboard: `reuse.toml` beside this
file has the command. The tables are in `docs/reference/policies.md`.
"""

from __future__ import annotations

import os
from statistics import median
from time import process_time

import pytest
from bench.harness import bundled

from kvcore import KVCache, Plugins, simulate
from kvcore_lab.comparison import compare_policies
from kvcore_replay.untimed import replay

POLICIES = [
    "arc", "s3fifo", "lruk", "slru", "workload-aware", "hazard:guard=false", "hazard",
]  # fmt: skip

LEAST = {
    1000: (1.6, 1.55),
    3000: (1.8, 1.75),
    6000: (1.2, 1.2),
    10_000: (1.05, 1.04),
    30_000: (1.0, 1.0),
}
"""The minimum of hits over those of LRU on the bundled trace, without and with the guard."""

HEAD = "\n| workload | blocks | lru | " + " | ".join([*POLICIES, "optimum"]) + " |"
"""The head of the tables."""


def hits(requests, blocks, eviction, prefix=None):
    """Return the blocks that hit in a serial replay."""
    size = requests[0].key_tokens
    cache = KVCache(blocks, size, eviction=eviction, prefix=prefix, accounting="keys")
    return replay(requests, cache).hit_blocks


def cells(name, requests, blocks, prefix=None):
    """Print and return the hits of policies in one pool, as multiples of those of LRU."""
    lru = hits(requests, blocks, "lru", prefix)
    found = {policy: hits(requests, blocks, policy, prefix) for policy in POLICIES}
    found["optimum"] = compare_policies(requests, "optimum", [blocks]).rows[0].hit_blocks
    ratios = {policy: count / max(lru, 1) for policy, count in found.items()}
    print(
        f"| {name} | {blocks:,} | {lru:,} |",
        *(f"{x:.3f} |" for x in ratios.values()),
        flush=True,
    )
    return ratios


@pytest.fixture(scope="module")
def conversation():
    """Return the bundled trace."""
    return bundled()


@pytest.mark.parametrize(
    ("title", "prefix", "tolerance"),
    [("the bundled trace", (), 0), ("one span a block", ("hashed:spans=block",), 0.05)],
    ids=["radix", "one-span-a-block"],
)
def test_the_bundled_trace(conversation, title, prefix, tolerance):
    """On the trace that it was tuned on it hits at least so much more than LRU.

    With one span a block, as in engines, it hits as much within 0.05.
    """
    print(HEAD)
    for blocks, (free, guarded) in LEAST.items():
        found = cells(title, conversation, blocks, *prefix)
        assert found["hazard:guard=false"] >= free - tolerance
        assert found["hazard"] >= guarded - tolerance


def test_sessions():
    """On the sessions that it was tuned on it hits at least so much more than LRU."""
    path = os.environ.get("KVCORE_WEKA")
    if path is None:
        pytest.skip("name a file of sessions by KVCORE_WEKA")
    requests = list(Plugins().build("workload", f"weka:path={path}"))
    print(HEAD)
    for blocks, (free, guarded) in {
        2000: (1, 1),
        10_000: (1.1, 1.08),
        50_000: (0.99, 1),
    }.items():
        found = cells("40 agent sessions", requests, blocks)
        assert found["hazard:guard=false"] >= free
        assert found["hazard"] >= guarded - 0.005 * (blocks == 50_000)


@pytest.mark.parametrize("rate", [1.0, 1.25, 1.5])
def test_under_the_clock(rate):
    """Print token hits, mean and p99 of TTFT, and goodput of the bundled trace, at a rate."""
    names = ["lru", *POLICIES]
    print(f"\n| rate, blocks | {' | '.join(names)} |")
    for blocks in (3000, 6000, 10_000, 30_000):
        row = []
        for name in names:
            result = simulate(
                "mooncake", rate_scale=rate, blocks=blocks, block_size=512, eviction=name,
                slo="ttft=2,tpot=0.1",
            )  # fmt: skip
            ttft, share = result.ttft, result.hit_ratio.token
            assert share > 0
            row.append(f"{share:.1%} {ttft.mean:.3g} s {ttft.p99:.2f} s {result.goodput:.3f}")
        print(f"| x{rate:g}, {blocks:,} | {' | '.join(row)} |", flush=True)


def test_cost(conversation):
    """Print the CPU time per request in 3,000 blocks; it has no limit of its own."""
    times = {name: [] for name in ["lru", *POLICIES]}
    for _ in range(5):
        for name, measured in times.items():
            start = process_time()
            hits(conversation, 3000, name)
            measured.append((process_time() - start) / len(conversation) * 1e6)
    print()
    for name, measured in times.items():
        print(f"{name}: {median(measured):.1f} us a request")
