"""The router of NVIDIA Dynamo: blocks to prefill and to hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import ClassVar

import attrs

from kvcore import InputError, Replica, Request, Router
from kvcore_cluster.router._draw import draw, lowest


@attrs.define(slots=False, eq=False)
class Dynamo(Router):
    """Send a request where the fewest blocks are to be prefilled and held. O(replicas).

    The cost of a replica, in blocks:

        prefill_scale * max(0, prefilling + prompt - credit) + decode + load_weight * requests

        credit = hit_weight * decay * hit
        decay  = 1 / (1 + delta * (prefilling - the least of all) / prompt)

    `prefilling` are the blocks that its requests without a first token have yet to compute,
    `decode` those that the prompts of all requests in flight fill. The lowest cost wins, a
    random one of equal ones; with a temperature a replica is drawn, with the weights
    exp(-cost / range of the costs / temperature).

    Options:
        hit_weight: credit in blocks for a block that hits.
        delta: how fast the credit decays with the prefill that waits.
        prefill_scale, load_weight: weights of prefill, and of requests in flight.
        temperature: of the draw; 0: the lowest cost wins.
        seed: number from which draws are derived.

    Source: ai-dynamo, lib/kv-router, scheduling/selector/default.rs and config.rs, 2026, whose
    defaults these are. Its credits for blocks in host memory, on disks and shared are left out.
    """

    name: ClassVar[str] = "dynamo"

    hit_weight: float = 1.0
    delta: float = 0.0
    prefill_scale: float = 1.0
    load_weight: float = 0.0
    temperature: float = 0.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: a negative weight or temperature.
        """
        for name, value in self.options().items():
            if value < 0:
                msg = f"router 'dynamo': {name}={value} must not be negative"
                raise InputError(msg)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the lowest cost, or one that is drawn by its cost."""
        least = min([replica.waiting_tokens for replica in replicas]) if self.delta else 0
        tokens = request.prompt_tokens
        costs = [self._blocks(tokens, replica, least) for replica in replicas]
        if not self.temperature:
            return lowest(costs, replicas, self.seed, self.name, request.id)
        low, high = min(costs), max(costs)
        scale = self.temperature * (high - low) or 1.0
        weights = [exp(-(cost - low) / scale) for cost in costs]
        point = draw(self.seed, self.name, request.id) * sum(weights)
        for weight, replica in zip(weights, replicas, strict=True):
            point -= weight
            if point < 0:
                return replica
        return replicas[-1]

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the cost of a replica, if no other has less prefill."""
        return self._blocks(request.prompt_tokens, replica, replica.waiting_tokens)

    def _blocks(self, tokens: int, replica: Replica, least: int) -> float:
        size, waiting = replica.block_size, replica.waiting_tokens
        prompt = tokens / size if tokens > size else 1.0
        credit = self.hit_weight * (replica.hit_tokens // size)
        if self.delta:
            credit /= 1 + self.delta * (waiting - least) / size / prompt
        prefill = self.prefill_scale * (waiting / size + prompt - credit)
        held = replica.prompt_blocks + self.load_weight * replica.requests
        return held + prefill if prefill > 0 else held
