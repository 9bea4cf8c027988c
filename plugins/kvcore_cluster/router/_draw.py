"""Random choices that depend on the request alone, not on earlier draws."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

from kvcore import Replica

T = TypeVar("T")

_BYTES = 8


def draw(seed: int, name: str, what: object) -> float:
    """Return a number in [0, 1), which follows from the arguments alone."""
    digest = blake2b(f"{seed}/{name}/{what!r}".encode(), digest_size=_BYTES).digest()
    return int.from_bytes(digest, "big") / (1 << 8 * _BYTES)


def draw_one(seed: int, name: str, what: object, among: Sequence[T]) -> T:
    """Return one of `among`, all equally likely."""
    if len(among) == 1:
        return among[0]
    return among[int(draw(seed, name, what) * len(among))]


def lowest(
    costs: Sequence[float], replicas: Sequence[Replica], seed: int, name: str, what: object
) -> Replica:
    """Return the replica with the lowest cost, a random one of several."""
    least = min(costs)
    if costs.count(least) == 1:
        return replicas[costs.index(least)]
    equal = [replica for cost, replica in zip(costs, replicas, strict=True) if cost == least]
    return draw_one(seed, name, what, equal)
