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

SECOND = 10**9


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
            latency=Roofline(model="llama-3-8b", device="h100", tensor_parallel=4),
            slo=SLO(ttft=5 * SECOND, tpot=SECOND // 10),
            rate_scale=2.0,
        )
        found = result.summary()
        print(
            f"{scheduler.name:4} first token after {found['ttft_s']['mean']:6.2f} s, "
            f"last after {found['e2e_s']['mean']:6.2f} s, {found['slo']['met']:5.1%} in time"
        )


if __name__ == "__main__":
    main()
