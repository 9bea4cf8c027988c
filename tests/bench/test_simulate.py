"""The memory of simulations, their growth with the requests, and what a host tier costs.

`targets.py` has their speed.
"""

from __future__ import annotations

from time import process_time

import pytest
from bench.harness import measured, simulation

import kvcore

TIER_PROMISED = 1.5


def test_peak_memory_at_block_16():
    """Simulating the bundled trace in blocks of 16 tokens peaks below 200 MB."""
    result = measured(*simulation("mooncake", 16, "--no-residency"))
    print(f"\nblock 16: peak {result.peak_mb:.0f} MB")
    assert result.peak_mb < 200


@pytest.mark.parametrize("block_size", [512, 16])
@pytest.mark.parametrize("memory", ["20GiB", None], ids=["20 GiB", "all"])
@pytest.mark.parametrize("write", ["evict", "through"])
def test_a_host_tier_adds_at_most_half_the_time(write, memory, block_size):
    """With a host tier of 64 GiB a run takes at most 1.5 times the CPU time of one without.

    With `write=through` twice as many blocks are stored, and the time is only printed.
    """
    options = {"block_size": block_size} | ({"memory": memory} if memory else {})

    def took(**more) -> float:
        start = process_time()
        kvcore.simulate("mooncake", **options, **more)
        return process_time() - start

    tier = f"host:memory=64GiB,write={write}"
    times = [(took(), took(tier=tier)) for _ in range(4)]
    plain, tiered = map(min, zip(*times, strict=True))
    print(f"\nwithout {plain:.2f} s, with a tier {tiered:.2f} s: {tiered / plain:.2f} x")
    assert write == "through" or tiered / plain <= TIER_PROMISED


def test_a_million_requests_take_linear_time():
    """CPU time grows in proportion to the requests; peak memory does not grow with them."""
    quarter, million = (
        measured(*simulation(f"zipf:requests={requests}", 16, "--no-residency"))
        for requests in (250_000, 1_000_000)
    )
    growth = million.cpu / quarter.cpu
    print(
        f"\n250 k requests: {quarter.cpu:.0f} s, {quarter.peak_mb:.0f} MB; 1 M: "
        f"{million.cpu:.0f} s, {million.peak_mb:.0f} MB; {growth:.2f} x the time"
    )
    assert growth <= 4 * 1.2
    assert million.peak_mb <= 1.1 * quarter.peak_mb
