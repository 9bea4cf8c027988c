"""The conformance tests of tiers."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from random import Random
from typing import Any, ClassVar

import attrs
import orjson
import pytest

from kvcore.cache import KVCache, Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.request import Request
from kvcore.testing.harness import Traffic, random_requests
from kvcore.testing.plugin import check_is_built_from_text, check_is_named
from kvcore.testing.tier_store import TierStoreTests
from kvcore.tiers import Level, Load, Tier, Tiers
from kvcore.trace import Trace
from kvcore.units import NS_PER_S

_BLOCK = 4
_OPEN = 4
_SLOT = 1000
"""Bytes of a block, in the tests that count them."""
_TRAFFIC = Traffic(key_tokens=_BLOCK, hints=True, most_keys=8, width=3, longest_wait=10**8)
_RULES = [
    {"write": write, "keep": keep, "load": load}
    for write in ("evict", "through", 1, 2)
    for keep in ("inclusive", "exclusive")
    for load in ("cost", "always", "never")
]


class TierTests(TierStoreTests):
    """The tests that every tier passes. A derived `Test...` class says how to make one.

    `tier` is called with options by name, `memory` among them, and returns a new tier:

        class TestMine(TierTests):
            tier = Mine

    A tier without code of its own in simulations has few tests to fail; those of its options
    and of its header say whether runs with it can be told apart, and made again. Those of its
    bytes are those of `TierStoreTests`.
    """

    tier: ClassVar[Callable[..., Tier]]

    def make(self, **options: Any) -> Tier:
        """Return a new tier with these options; without `memory`, with that of 12 slots."""
        return type(self).tier(**({"memory": 12 * _SLOT} | options))

    # The model of it: what a simulation takes it for.

    def test_is_a_named_tier(self) -> None:
        """Its class derives from Tier and has a name and a docstring of its own."""
        check_is_named(self.make(), Tier)

    def test_is_built_from_text(self) -> None:
        """Its own options, written as text, make a tier with equal options."""
        check_is_built_from_text(self.make())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"memory": 0},
            {"memory": -1},
            {"read_bandwidth": 0},
            {"write_bandwidth": 0},
            {"latency": -1.0},
            {"max_wait": -1.0},
            {"write": "never"},
            {"write": 0},
            {"keep": "both"},
            {"load": "sometimes"},
        ],
        ids=str,
    )
    def test_impossible_options_are_refused(self, wrong: dict[str, Any]) -> None:
        """Sizes, rates, times and rules that cannot be raise InputError."""
        with pytest.raises(InputError, match=next(iter(wrong))):
            self.make(**wrong)

    def test_sizes_have_units(self) -> None:
        """Memory and bandwidths may be text with a unit, and are bytes then."""
        tier = self.make(memory="2KiB", read_bandwidth="3GB", write_bandwidth="4MB")
        sizes = tier.memory, tier.read_bandwidth, tier.write_bandwidth
        assert sizes == (2048, 3 * 10**9, 4 * 10**6)

    def test_slots_are_whole_blocks_of_all_layers(self) -> None:
        """There are as many slots as blocks fit, each with its bytes in all layers."""
        (level,) = Tiers(KVCache(4), [self.make(memory=5 * _SLOT - 1)], _SLOT).levels
        assert (level.pool.blocks + 1) * _SLOT == 5 * _SLOT
        with pytest.raises(InputError, match="less than a block"):
            Tiers(KVCache(4), [self.make(memory=_SLOT - 1)], _SLOT)

    def test_serves_one_run(self) -> None:
        """One instance is for one run: a second cache is refused."""
        tier = self.make()
        Tiers(KVCache(4), [tier], _SLOT)
        with pytest.raises(InputError):
            Tiers(KVCache(4), [tier], _SLOT)

    def test_header_tells_how_to_make_it_again(self) -> None:
        """What the header of a trace says of it is JSON, and its options make an equal one."""
        out = BytesIO()
        trace = Trace(out)
        tier = self.make(eviction="lfu:half_life=3", write=2)
        Tiers(KVCache(4, trace=trace), [tier], _SLOT)
        trace.close()
        (said,) = orjson.loads(out.getvalue().splitlines()[0])["tiers"]
        slots = int(tier.memory) // _SLOT
        assert (said["name"], said["slots"], said["slot_bytes"]) == (tier.name, slots, _SLOT)
        assert type(tier)(**said["options"]).options() == tier.options()

    @pytest.mark.parametrize("blocks", [1, 7])
    def test_a_load_takes_latency_and_bytes_over_bandwidth(self, blocks: int) -> None:
        """A load on a free link ends as its options say, rounded up; so does a write."""
        tier = self.make()
        link = Tiers(KVCache(4), [tier], _SLOT).levels[0].link
        size, latency = blocks * 10**6, round(tier.latency * NS_PER_S)
        for rate, asked, queued in (
            (int(tier.read_bandwidth), link.load_ns, link.load),
            (int(tier.write_bandwidth), link.store_ns, link.store),
        ):
            now = link.free_at
            took = -(-size * NS_PER_S // rate) + latency
            assert asked(size, now) == took
            assert queued(size, now) == now + took

    @pytest.mark.parametrize(
        "rules", _RULES, ids=lambda rules: "-".join(map(str, rules.values()))
    )
    def test_random_traffic(self, rules: dict[str, Any]) -> None:
        """Whatever its rules, every block is in one place, and decided on alike each time."""
        once, again = (_Traffic(self.make(**rules)).run(_RULES.index(rules)) for _ in range(2))
        assert once == again, "run again, it decided otherwise"

    def test_what_was_stored_is_found(self) -> None:
        """Blocks that the pool has evicted are found, and loaded where loading is for free."""
        traffic = _Traffic(self.make(memory=100 * _SLOT, load="always"))
        prompts = [
            Request(
                id=n,
                prompt_tokens=4 * _BLOCK + 1,
                keys=[*range(9 * n, 9 * n + 4)],
                key_tokens=_BLOCK,
            )
            for n in (1, 2, 3, 4, 1)
        ]
        for number, request in enumerate(prompts):
            traffic.serve(attrs.evolve(request, id=number))
        loaded = traffic.level.stats.loaded
        assert (loaded, traffic.level.link.read_bytes) == (4, 4 * _SLOT)


class _Traffic:
    """Random requests to a small cache above one tier, several open at a time.

    The integrity of both is checked after each step.
    """

    def __init__(self, tier: Tier) -> None:
        self.cache = KVCache(12, _BLOCK, accounting="tokens")
        self.tiers = Tiers(self.cache, [tier], _SLOT)
        self.now = 0
        self.opened: list[tuple[Sequence, Load | None]] = []

    @property
    def level(self) -> Level:
        """The one tier."""
        return self.tiers.levels[0]

    def run(self, seed: int) -> list[tuple[int, ...]]:
        """Serve random requests; return what has been decided for each."""
        random = Random(seed)  # noqa: S311
        decided: list[tuple[int, ...]] = []
        for request in random_requests(seed, 60, _TRAFFIC):
            self.now = max(self.now, request.arrival)
            while not self.open(request) and self.opened:
                self.close(random.randrange(len(self.opened)))
            if len(self.opened) == _OPEN:
                self.close(random.randrange(len(self.opened)))
            stats, link = self.level.stats, self.level.link
            decided.append((
                stats.stored, stats.found, stats.loaded, stats.skipped, stats.refused,
                link.free_at, self.level.pool.free_blocks, self.cache.pool.free_blocks,
            ))  # fmt: skip
        while self.opened:
            self.close(0)
        moved = stats.stored * _SLOT, stats.loaded * _SLOT
        assert (link.written_bytes, link.read_bytes) == moved
        used = self.level.pool.blocks - self.level.pool.free_blocks
        assert stats.stored - sum(stats.dropped.values()) == used
        return decided

    def serve(self, request: Request) -> None:
        """Serve `request` by itself."""
        assert self.open(request)
        self.close(0)

    def open(self, request: Request) -> bool:
        """Open `request`, and begin to load what it did not hit; False if there is no room."""
        try:
            seq = self.cache.open(request, None, self.now)
        except OutOfBlocks:
            return False
        load = self.tiers.load(seq, self.now, lambda tokens, _: tokens * 10**6)
        self.opened.append((seq, load))
        self.cache.check_integrity()
        return True

    def close(self, number: int) -> None:
        """Finish the load of an open request, compute the rest, and close it."""
        seq, load = self.opened.pop(number)
        if load is not None:
            self.now = max(self.now, load.ready)
            computed = self.tiers.finish(load, self.now)
            assert computed == load.tokens
            self.cache.check_integrity()
        self.cache.commit(seq, seq.tokens - seq.computed, self.now)
        self.cache.close(seq, self.now)
        self.cache.check_integrity()
