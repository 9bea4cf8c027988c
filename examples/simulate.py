"""Simulate the start of the bundled trace under three schedulers, at twice its speed.

Run it with `python examples/simulate.py`.
"""

from __future__ import annotations

from itertools import islice

from kvcore import SLO, KVCache
from kvcore.serving import simulate
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Roofline
from kvcore_plugins.scheduler import FCFS, SJF, LeastSlack
from kvcore_plugins.workload import Mooncake


def main() -> None:
    """Print what clients see of each scheduler."""
    workload = Mooncake()
    requests = list(islice(workload, 2_000))
    for scheduler in (FCFS(), SJF(), LeastSlack(ttft=5.0, tpot=0.1)):
        result = simulate(
            requests,
            cache=KVCache(
                blocks=100_000,
                block_size=16,
                key_tokens=workload.key_tokens,
                eviction=LRU(),
            ),
            scheduler=scheduler,
            latency=Roofline(model="llama-3.1-8b", device="h100", tensor_parallel=4),
            slo=SLO.in_seconds(ttft=5.0, tpot=0.1),
            rate_scale=2.0,
        )
        assert result.ttft is not None
        assert result.e2e is not None
        print(
            f"{scheduler.name:4} first token after {result.ttft.mean:6.2f} s, "
            f"last after {result.e2e.mean:6.2f} s, {result.slo_attainment or 0:5.1%} in time"
        )


if __name__ == "__main__":
    main()
