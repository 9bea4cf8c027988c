"""Synthetic requests: popular prefixes out of a tree, unique suffixes, chosen arrivals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate, count, islice, repeat
from random import Random
from typing import ClassVar

import attrs
from attrs.validators import ge, in_, le

from kvcore import InputError, Request, Workload
from kvcore.units import NS_PER_S, as_float
from kvcore.workloads import poisson_arrivals
from kvcore_plugins.workload._plain import request_maker

ARRIVALS = ("poisson", "bursty", "uniform")
_DRAW_BITS = 53
_WEIGHT = 2**60
_MANY = 10_000_000
_KEPT_KEYS = 1 << 18


@attrs.define(eq=False)
class Zipf(Workload):
    """Prompts of a Zipf-popular prefix and a suffix of their own.

    Prefix r of 1..`prefixes` is drawn with probability proportional to r^-`skew`, by exact
    inversion of the finite distribution. The prefixes are the leaves of a tree of `levels`
    levels that share the tokens equally: `branching` neighbours have all but the last level
    in common, `branching`^2 neighbours all but the last two, and so on.

    The draws rest on nothing but the generator's own 53-bit numbers, integers, decimal
    arithmetic and exact comparisons, so requests are equal on every machine.

    Attributes:
        requests: number of requests.
        arrivals: `poisson`; `bursty`, groups of `burst` at once with Poisson starts; or
            `uniform`, evenly spaced. The first request arrives at 0.
        rate: mean requests a second, whatever the arrivals.
        burst: requests in a burst.
        prefixes: number of different prefixes.
        skew: exponent of the popularity; 0 makes all equally popular.
        prefix_tokens, suffix_tokens, output_tokens: lengths, the same for each request.
        levels, branching: shape of the prefix tree; `levels=1` shares nothing between
            prefixes.
        key_tokens: tokens a key stands for.
        seed: seed of every random choice.
    """

    name: ClassVar[str] = "zipf"

    requests: int = attrs.field(default=10_000, validator=ge(1))
    arrivals: str = attrs.field(default="poisson", validator=in_(ARRIVALS))
    rate: float = attrs.field(default=10.0, converter=as_float, validator=[ge(1e-9), le(1e9)])
    burst: int = attrs.field(default=8, validator=[ge(1), le(_MANY)])
    prefixes: int = attrs.field(default=1_000, validator=[ge(1), le(_MANY)])
    skew: float = attrs.field(default=1.0, converter=as_float, validator=[ge(0), le(100)])
    prefix_tokens: int = attrs.field(default=2_048, validator=[ge(0), le(_MANY)])
    suffix_tokens: int = attrs.field(default=256, validator=[ge(0), le(_MANY)])
    output_tokens: int = attrs.field(default=128, validator=[ge(0), le(_MANY)])
    levels: int = attrs.field(default=3, validator=[ge(1), le(100)])
    branching: int = attrs.field(default=4, validator=[ge(1), le(_MANY)])
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse prompts of no tokens."""
        if self.prefix_tokens + self.suffix_tokens == 0:
            msg = "'prefix_tokens' and 'suffix_tokens' must not both be 0"
            raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Keeps one number for each prefix in memory, and some keys."""
        prompt = self.prefix_tokens + self.suffix_tokens
        own = -(-prompt // self.key_tokens) - self._shared_keys
        fresh = self.prefixes * self._shared_keys
        # Popular prefixes come again soon; their keys are the same objects in each request.
        kept = _KEPT_KEYS // max(1, self._shared_keys)
        prefix_keys = lru_cache(maxsize=kept)(self._prefix_keys)
        request = request_maker(prompt, self.output_tokens, self.key_tokens)
        draws = zip(self._arrivals(), self._popular(), strict=False)
        for serial, (arrival, prefix) in enumerate(islice(draws, self.requests)):
            yield request(serial, arrival, [*prefix_keys(prefix), *range(fresh, fresh + own)])
            fresh += own

    @property
    def size(self) -> int:
        """The number of requests."""
        return self.requests

    @property
    def _shared_keys(self) -> int:
        """Number of keys of a prompt that its prefix alone determines."""
        full, rest = divmod(self.prefix_tokens, self.key_tokens)
        return full + (rest > 0 and self.suffix_tokens == 0)

    def _prefix_keys(self, prefix: int) -> list[int]:
        """Return the keys that a prefix determines: a block's level is its last token's."""
        shared, keys = self._shared_keys, list[int]()
        for level in range(1, self.levels + 1):
            end = self.prefix_tokens * level // self.levels // self.key_tokens
            end = shared if level == self.levels else end
            node = prefix // self.branching ** (self.levels - level)
            keys.extend(range(node * shared + len(keys), node * shared + end))
        return keys

    def _popular(self) -> Iterator[int]:
        with localcontext(prec=24):
            skew = Decimal(repr(self.skew))
            weights = [int(_WEIGHT / Decimal(r) ** skew) for r in range(1, self.prefixes + 1)]
        *ends, total = accumulate(weights)
        # Draws are multiples of 2^-53. So are the bounds, and to compare them is exact.
        bounds = [-(-(end << _DRAW_BITS) // total) / 2**_DRAW_BITS for end in ends]
        draws = iter(self._generator("prefixes").random, None)
        return map(bisect_right, repeat(bounds), draws)

    def _arrivals(self) -> Iterator[int]:
        if self.arrivals == "uniform":
            return (round(serial * NS_PER_S / self.rate) for serial in count())
        draw = self._generator("arrivals").random
        return poisson_arrivals(draw, self.rate, self.burst if self.arrivals == "bursty" else 1)

    def _generator(self, purpose: str) -> Random:
        return Random(f"{self.seed}/{purpose}")  # noqa: S311 - a workload, not a secret
