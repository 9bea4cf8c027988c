"""What would hold where a workload is too much: searched by simulating it again."""

from __future__ import annotations

from contextlib import suppress
from decimal import ROUND_FLOOR, Context
from typing import Any

import attrs

from kvcore.config import RunParts
from kvcore.errors import InputError
from kvcore.progress import Tick, unseen
from kvcore.serving import Result, simulate
from kvcore.serving.result import offered_load

MOST_RATES = 6
"""Simulations in search of a rate, at most."""

DOUBLINGS = 5
"""How often a pool or a number of GPUs is doubled, at most."""

CLOSE = 1.05
"""How near the rate that holds and the next one that does not are, as a ratio."""


def find_capacity(
    parts: RunParts, result: Result, tick: Tick = unseen
) -> dict[str, float | int]:
    """Return options with which the queue of a workload does not grow to the end.

    Empty if it does not grow as it is. Else as many of these as are found, each for itself:
    `rate_scale`, the fastest rate within 5 %; `blocks`, the smallest doubling of a pool
    whose size was given; `tensor_parallel`, the smallest doubling of the GPUs. Each was
    simulated: some 10 runs like `result`, at most 16.

    Args:
        parts: what was simulated; plugins must be named there, since each run has its own.
        result: what came of it.
        tick: called with 1 after each simulation.
    """
    if result.saturation is None or not result.saturation.saturated:
        return {}
    search = _Search(parts, result, tick)
    found = {
        "rate_scale": search.rate(),
        "blocks": search.blocks(),
        "tensor_parallel": search.devices(),
    }
    return {name: value for name, value in found.items() if value is not None}


@attrs.frozen
class _Search:
    """Simulations of the same workload with one option changed."""

    parts: RunParts
    result: Result
    tick: Tick

    def rate(self) -> float | None:
        """Return a rate that holds, found by bisection."""
        saturation, load = self.result.saturation, self.result.offered_load or 0
        assert saturation is not None
        given = self.parts.config.rate_scale
        # Above a load of 1 nothing holds.
        high, low = given / max(load, 1), 0.0
        guess = min(high, given * saturation.served_per_s / saturation.arrivals_per_s)
        for _ in range(MOST_RATES):
            rate = _below(guess)
            if not low < rate < high or (low and high < CLOSE * low):
                break
            if self._holds(rate_scale=rate):
                low = rate
            else:
                high = rate
            guess = (low + high) / 2 if low else 0.8 * high
        return low or None

    def blocks(self) -> int | None:
        """Return the size of a pool that holds, if its size was given."""
        if not self.parts.sized:
            return None
        sizes = [self.parts.blocks << doubling for doubling in range(1, DOUBLINGS + 1)]
        able = [blocks for blocks in sizes if self._may(blocks, None)]
        found = (blocks for blocks in able if self._holds(blocks=blocks, memory=None))
        return next(found, None)

    def devices(self) -> int | None:
        """Return a number of GPUs that holds."""
        parts = self.parts
        for doubling in range(1, DOUBLINGS + 1):
            devices = parts.deployment.devices << doubling
            with suppress(InputError):  # the model may not be divided by so many
                blocks = parts.blocks
                if not parts.sized:
                    blocks = attrs.evolve(parts.deployment, devices=devices).blocks(
                        parts.batching.max_seqs
                    )
                if self._may(blocks, devices) and self._holds(tensor_parallel=devices):
                    return devices
        return None

    def _may(self, blocks: int, devices: int | None) -> bool:
        """Return False if the offered load rules a pool or a number of GPUs out."""
        parts, tokens = self.parts, blocks * self.parts.geometry.block_size
        latency = self.result.latency if devices is None else parts.latency(devices)
        log, forgetting = self.result.log, self.result.cache.retention is not None
        load = offered_load(log, parts.batching, latency, tokens, forgetting=forgetting)
        return load is None or load <= 1

    def _holds(self, **changes: Any) -> bool:
        """Return True if the queue does not grow with these options."""
        parts = self.parts
        config = attrs.evolve(parts.config, **changes)
        again = RunParts(config, parts.plugins, workload=parts.workload)
        run = simulate(
            again.workload,
            **again.arguments(),
            allocation=config.allocation,
            max_output=self.result.max_output,
            residency=False,
        )
        self.tick(1)
        return run.saturation is None or not run.saturation.saturated


def _below(number: float) -> float:
    """Return a number with two digits, rounded down."""
    return float(Context(prec=2, rounding=ROUND_FLOOR).create_decimal(number))
