"""The conformance tests of prefix caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvcore.cache import EvictionPolicy, KVCache, PrefixCache, Span
from kvcore.errors import InputError, OutOfBlocks, PolicyError
from kvcore.request import Request
from kvcore.testing.fake_policies import (
    LIFETIME_NS,
    BookkeepingPolicy,
    ExpiringPolicy,
    FailingPolicy,
    Oldest,
)
from kvcore.testing.harness import Driver, Traffic, random_steps, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcore.cache import Sequence

BLOCK = 4


class PrefixCacheTests:
    """What holds of every prefix cache. Derive a `Test...` class and say how to make yours.

    `prefix` (or `make`, if that needs fixtures of the instance) returns a new one, made
    with the same options each time:

        class TestMine(PrefixCacheTests):
            prefix = Mine

    The tests drive it through a `KVCache` and look only at what the contract promises. A
    prefix cache that lacks an ability says so, and the tests of it are skipped:

    Attributes:
        shares: a request finds what another has committed.
        splits: a prompt that leaves a cached one in its middle finds the common part.
        expires: spans that an eviction policy lets expire do not match.
    """

    prefix: ClassVar[Callable[[], PrefixCache]]
    shares: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    expires: ClassVar[bool] = True

    def make(self) -> PrefixCache:
        """Return a new prefix cache."""
        return type(self).prefix()

    def test_is_a_named_prefix_cache(self) -> None:
        """Its class derives from PrefixCache and has a name of its own."""
        prefix = self.make()
        assert isinstance(prefix, PrefixCache)
        assert type(prefix).name

    def test_serves_one_cache(self) -> None:
        """A second KVCache is refused by name."""
        prefix = self.make()
        KVCache(8, eviction=Oldest(), prefix=prefix)
        with pytest.raises(InputError, match=type(prefix).name):
            KVCache(8, eviction=Oldest(), prefix=prefix)

    def test_empty_matches_nothing(self) -> None:
        """Nothing is found before anything is stored, and an empty prompt finds nothing."""
        cache = self._cache()
        assert cache.probe(_ask("abc")) == 0
        assert cache.probe(_ask("")) == 0

    def test_finds_what_was_committed(self) -> None:
        """A longer prompt hits all blocks of a shorter one before it."""
        self._needs("shares")
        cache = self._cache()
        _serve(cache, "abc")
        found = cache.probe(_ask("abcd")), cache.open(_ask("abcd")).hit_blocks
        assert found == (3, 3)

    def test_finds_only_what_was_committed(self) -> None:
        """What is allocated, but not computed, matches nobody."""
        cache = self._cache()
        seq = cache.open(_ask("abc"))
        assert cache.probe(_ask("abcd")) == 0
        cache.commit(seq, 2 * BLOCK)
        assert cache.probe(_ask("abcd")) == 2 * self.shares

    def test_finds_the_common_part(self) -> None:
        """A prompt that diverges inside a cached one hits up to there."""
        self._needs("shares", "splits")
        cache = self._cache()
        _serve(cache, "abcde", "abxyz")
        assert [cache.probe(_ask(text)) for text in ("abcx", "abxx", "axcde", "m")] == [
            3,
            3,
            1,
            0,
        ]

    def test_leaves_the_last_token_to_compute(self) -> None:
        """Of a prompt cached in whole, the last full block does not hit."""
        self._needs("shares", "splits")
        cache = self._cache()
        _serve(cache, "abc")
        seq = cache.open(_ask("abc"))
        cache.commit(seq, BLOCK)
        cache.check_integrity()
        assert (seq.hit_blocks, cache.prefix.cached, seq.private_blocks) == (2, 3, 0)

    def test_hits_the_blocks_themselves(self) -> None:
        """A hit shares the physical blocks of who computed them."""
        self._needs("shares")
        cache = self._cache()
        first = _start(cache, "abc")
        table = cache.block_table(first)
        cache.close(first)
        assert cache.block_table(cache.open(_ask("abcd")))[:3] == table

    def test_coarse_keys(self) -> None:
        """Where a key stands for three blocks, hits are counted in blocks all the same."""
        self._needs("shares", "splits")
        cache = self._cache(24, key_tokens=3 * BLOCK)
        _serve(cache, "abc", key_tokens=3 * BLOCK)
        long, other = (_ask(text, key_tokens=3 * BLOCK) for text in ("abc", "abx"))
        assert (cache.probe(long), cache.probe(other)) == (8, 6)

    def test_probe_is_pure(self) -> None:
        """Looking changes nothing."""
        cache = self._cache()
        _serve(cache, "abc", "x")
        before = snapshot(cache)
        cache.probe(_ask("abxy"), 99)
        assert snapshot(cache) == before

    def test_close_leaves_only_what_is_shared(self) -> None:
        """Committed full blocks stay cached, if at all; everything else is free."""
        cache = self._cache()
        _serve(cache, "abc", tokens=2 * BLOCK + 1)
        assert cache.prefix.cached == cache.prefix.unpinned == 2 * self.shares
        assert cache.pool.free == cache.pool.blocks - cache.prefix.cached

    def test_pinned_blocks_stay(self) -> None:
        """What open sequences hold is never evicted: there is no room."""
        cache = self._cache(8)
        held = [_start(cache, "abcd"), _start(cache, "abcx")]
        with pytest.raises(OutOfBlocks):
            cache.open(_ask("lmnopqr"))
        for seq in held:
            cache.close(seq)
        cache.open(_ask("lmnopqr"))
        cache.check_integrity()

    def test_a_refused_open_changes_nothing(self) -> None:
        """All or nothing: no pin, no split, no eviction."""
        cache = self._cache(8)
        _serve(cache, "abc")
        _start(cache, "xyz")
        before = snapshot(cache)
        with pytest.raises(OutOfBlocks):
            cache.open(_ask("abmnopqr"))
        assert snapshot(cache) == before

    def test_a_refused_extend_changes_nothing(self) -> None:
        """All or nothing: what would have fitted is not allocated."""
        cache = self._cache(8)
        _serve(cache, "abc")
        seq = _start(cache, "xyz")
        before = snapshot(cache)
        with pytest.raises(OutOfBlocks):
            cache.extend(seq, 6 * BLOCK)
        assert snapshot(cache) == before

    def test_evicts_what_is_missing_and_no_more(self) -> None:
        """Free blocks are used up first; what is left of a victim still matches."""
        self._needs("shares")
        cache = self._cache(8)
        _serve(cache, "abcd", "xy")
        cache.open(_ask("lmnop"))
        cache.check_integrity()
        assert (cache.prefix.evicted, cache.pool.free) == (3, 0)
        assert [cache.probe(_ask(text)) for text in ("xyz", "abcde")] == [2, 1]

    def test_a_hit_is_no_victim_of_its_own(self) -> None:
        """What an admission hits is safe from the evictions that it causes."""
        self._needs("shares")
        cache = self._cache(6)
        _serve(cache, "abc", "xyz")
        seq = cache.open(_ask("abclmn"))
        distinct = len(set(cache.block_table(seq)))
        assert (seq.hit_blocks, cache.prefix.evicted, distinct) == (3, 3, 6)

    def test_duplicates_are_freed(self) -> None:
        """Two sequences that compute one prompt end with one copy of it."""
        self._needs("shares")
        cache = self._cache()
        one, two = cache.open(_ask("abc")), cache.open(_ask("abc"))
        for seq in (one, two):
            cache.commit(seq, 3 * BLOCK)
            cache.check_integrity()
        assert cache.block_table(one) == cache.block_table(two)
        assert (cache.prefix.cached, cache.pool.free) == (3, cache.pool.blocks - 3)

    def test_fork_pins(self) -> None:
        """What two sequences hold stays until both have closed."""
        cache = self._cache(6)
        seq = _start(cache, "abc")
        child = cache.fork(seq)
        assert cache.block_table(child) == cache.block_table(seq)
        cache.close(seq)
        cache.check_integrity()
        with pytest.raises(OutOfBlocks):
            cache.open(_ask("lmno"))
        cache.close(child)
        cache.check_integrity()
        cache.open(_ask("lmno"))

    def test_a_fork_commits_for_both(self) -> None:
        """Blocks that two sequences hold are cached once, or stay private to both."""
        cache = self._cache()
        seq = cache.open(_ask("abc"))
        child = cache.fork(seq)
        cache.commit(seq, 3 * BLOCK)
        cache.check_integrity()
        cache.commit(child, 3 * BLOCK)
        cache.check_integrity()
        assert cache.block_table(child) == cache.block_table(seq)
        assert cache.pool.free == cache.pool.blocks - 3

    @pytest.mark.parametrize(
        "wrong", [RuntimeError("tired"), None, "no span", "pinned", "foreign"]
    )
    def test_undoes_what_a_policy_fails(self, wrong: Any) -> None:
        """An admission without a victim is taken back, and the policy named."""
        self._needs("shares", "splits")
        policy = FailingPolicy(wrong=wrong)
        cache = self._cache(8, policy)
        _serve(cache, "abcd")
        held = _start(cache, "lm")
        if wrong == "pinned":
            policy.wrong = held.span
        elif wrong == "foreign":
            policy.wrong = _start(self._cache(), "lm").span
        before = snapshot(cache)
        with pytest.raises(PolicyError, match="'failing'"):
            cache.open(_ask("abuvwx"))
        cache.check_integrity()
        assert snapshot(cache) == before

    def test_expired_spans_do_not_match(self) -> None:
        """They end the match; an admission drops them, a probe does not."""
        self._needs("shares", "expires")
        cache = self._cache(8, ExpiringPolicy())
        _serve(cache, "abc")
        before = snapshot(cache)
        found = [cache.probe(_ask("abcd"), now) for now in (LIFETIME_NS - 1, LIFETIME_NS)]
        assert (found, snapshot(cache)) == ([3, 0], before)
        cache.open(_ask("abcd"), now=LIFETIME_NS)
        cache.check_integrity()
        assert (cache.prefix.cached, cache.prefix.expired_blocks) == (0, 3)

    def test_yields_parents_before_children(self) -> None:
        """`spans()` has every span, each after its parent, and as many blocks as cached."""
        cache = self._cache(24)
        _serve(cache, "ab", "abcd", "abxy", "lmn")
        seen: set[Span] = set()
        for span in cache.prefix.spans():
            assert span.parent is not None
            assert span.parent in seen or span.parent.end == 0
            seen.add(span)
        assert sum(span.blocks for span in seen) == cache.prefix.cached

    @pytest.mark.parametrize("seed", range(4))
    def test_keeps_its_integrity(self, seed: int) -> None:
        """Through random calls of every kind; what is refused changes nothing."""
        driver = Driver(self._cache(14, key_tokens=2 * BLOCK))
        for step in random_steps(seed, 80, _TRAFFIC):
            driver.careful_step(step)

    @pytest.mark.parametrize("seed", range(4))
    def test_tells_the_policy_of_every_change(self, seed: int) -> None:
        """Spans, their sizes and pins can be kept from the policy's callbacks alone."""
        books = BookkeepingPolicy()
        cache = self._cache(14, books, key_tokens=2 * BLOCK)
        driver = Driver(cache)
        for step in random_steps(seed, 80, _TRAFFIC):
            driver.step(step)
            spans = list(cache.prefix.spans())
            assert books.sizes == {span: span.blocks for span in spans}
            assert books.pinned & set(spans) == {span for span in spans if span.ref_count}

    @pytest.mark.parametrize("seed", range(4))
    def test_decides_alike_without_ids(self, seed: int) -> None:
        """A pool that only counts gives the same hits and evictions as one with ids."""
        steps = random_steps(seed, 80, _TRAFFIC)
        runs = [
            Driver(self._cache(14, key_tokens=2 * BLOCK, ids=ids)).run(steps)
            for ids in (True, False)
        ]
        assert runs[0] == runs[1]

    def _cache(
        self, blocks: int = 12, eviction: EvictionPolicy | None = None, **options: Any
    ) -> KVCache:
        return KVCache(
            blocks,
            BLOCK,
            eviction=eviction or Oldest(),
            prefix=self.make(),
            **{"ids": True} | options,
        )

    def _needs(self, *abilities: str) -> None:
        for ability in abilities:
            if not getattr(self, ability):
                pytest.skip(f"{type(self).__name__} declares {ability} = False")


_TRAFFIC = Traffic(key_tokens=2 * BLOCK, hints=True)


def _ask(text: str, tokens: int | None = None, *, key_tokens: int = BLOCK) -> Request:
    """Return a request whose chained keys are the prefixes of `text`."""
    return Request(
        id=text,
        prompt_tokens=len(text) * key_tokens if tokens is None else tokens,
        keys=[text[:end] for end in range(1, len(text) + 1)],
        key_tokens=key_tokens,
    )


def _start(
    cache: KVCache, text: str, tokens: int | None = None, key_tokens: int = BLOCK
) -> Sequence:
    """Open a request for `text` and compute its prompt."""
    seq = cache.open(_ask(text, tokens, key_tokens=key_tokens))
    cache.commit(seq, seq.tokens - seq.computed)
    cache.check_integrity()
    return seq


def _serve(
    cache: KVCache, *texts: str, tokens: int | None = None, key_tokens: int = BLOCK
) -> None:
    """Serve a request for each of `texts`, one after the other."""
    for text in texts:
        cache.close(_start(cache, text, tokens, key_tokens))
        cache.check_integrity()
