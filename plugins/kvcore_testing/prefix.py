"""The conformance tests of prefix indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvcore.cache import KVCache, PrefixIndex, ScoreEviction, Span
from kvcore.errors import InputError
from kvcore.request import Request
from kvcore_testing.harness import Driver, Traffic, living, random_steps, snapshot
from kvcore_testing.plugin import NamedTests, disguise, seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcore.request import Key

BLOCK = 4
_RATIO = 3
_MANY = 100
# Evicted spans that the eviction policy may refer to until it compacts its heap.
_SLACK = 32
_TRAFFIC = Traffic(key_tokens=2 * BLOCK, hints=True)
_LAYOUTS: list[dict[str, Any]] = [
    {"accounting": "tokens", "block_size": BLOCK},
    {"accounting": "tokens", "block_size": 2 * BLOCK},
    {"accounting": "keys", "block_size": BLOCK},
]
_layouts = pytest.mark.parametrize("layout", _LAYOUTS, ids=str)


class Oldest(ScoreEviction):
    """Evicts the span that was released first."""

    name: ClassVar[str] = "oldest"

    def score(self, span: Span, now: int) -> int:
        """Return the serial number of its release."""
        return span.released_order


class PrefixIndexTests(NamedTests[PrefixIndex]):
    """Conformance tests of a prefix index; a derived `Test...` class makes the index.

    The attribute `prefix` is what `make` calls:

        class TestMine(PrefixIndexTests):
            prefix = Mine

    The tests call it through a `KVCache`. An index that stores no blocks declares
    `shares = False`, and the tests of its matches are skipped.
    """

    base = PrefixIndex
    prefix: ClassVar[Callable[[], PrefixIndex]]

    seed = seeds(4)

    def test_serves_one_cache(self) -> None:
        """A second `KVCache` with the same index is an InputError that names the index."""
        prefix = self.make()
        KVCache(8, eviction=Oldest(), prefix=prefix)
        with pytest.raises(InputError, match=type(prefix).name):
            KVCache(8, eviction=Oldest(), prefix=prefix)

    def test_empty_matches_nothing(self) -> None:
        """There are no hits before a block is stored, and none of an empty prompt."""
        cache = self._cache()
        assert cache.probe(_ask("abc")) == 0
        assert cache.probe(_ask("")) == 0

    def test_finds_committed_blocks(self) -> None:
        """A longer prompt hits all blocks of a shorter one before it, and no more."""
        cache = self._cache()
        shares = cache.prefix.shares
        seq = cache.open(_ask("abc"))
        assert cache.probe(_ask("abcd")) == 0
        cache.commit(seq, 2 * BLOCK)
        assert cache.probe(_ask("abcd")) == 2 * shares
        cache.commit(seq, BLOCK)
        assert cache.probe(_ask("abcd")) == 3 * shares
        cache.close(seq)
        assert cache.open(_ask("abcd")).hit_blocks == 3 * shares

    def test_finds_the_common_part(self) -> None:
        """A prompt that diverges from a cached one hits the blocks before that point."""
        self._needs_shares()
        cache = self._cache()
        _serve(cache, "abcde", "abxyz")
        prompts = {"abcx": 3, "abxx": 3, "axcde": 1, "m": 0}
        assert {text: cache.probe(_ask(text)) for text in prompts} == prompts

    def test_coarse_keys(self) -> None:
        """Where a key stands for three blocks, hits are counted in blocks."""
        self._needs_shares()
        cache = self._cache(24, key_tokens=_RATIO * BLOCK)
        _serve(cache, "abc", key_tokens=_RATIO * BLOCK)
        long, other = (_ask(text, key_tokens=_RATIO * BLOCK) for text in ("abc", "abx"))
        assert (cache.probe(long), cache.probe(other)) == (8, 6)

    def test_finds_the_rest_of_a_victim(self) -> None:
        """A span whose tail was evicted is found up to its new end, also inside a key."""
        self._needs_shares()
        cache = self._cache(12, key_tokens=_RATIO * BLOCK)
        _serve(cache, "abc", key_tokens=_RATIO * BLOCK)
        cache.close(cache.open(_ask("xy", 5 * BLOCK, key_tokens=_RATIO * BLOCK)))
        cache.check_integrity()
        tokens = cache.probe(_ask("abcd", key_tokens=_RATIO * BLOCK))
        evicted = cache.tree.evicted_blocks
        assert (evicted, tokens) == (2, 7), (
            f"of 9 blocks, {evicted} of 2 were evicted, and {tokens} of the other 7 are found: "
            "remove(span, first) must forget the rows of the blocks from `first` on"
        )

    def test_probe_is_pure(self) -> None:
        """`probe` changes nothing."""
        cache = self._cache()
        _serve(cache, "abc", "x")
        before = snapshot(cache)
        cache.probe(_ask("abxy"), 99)
        assert snapshot(cache) == before

    @_layouts
    def test_matches_all_cached_blocks(self, seed: int, layout: dict[str, Any]) -> None:
        """`match` finds all cached blocks, up to every limit and after every span of a path."""
        self._needs_shares()
        driver = Driver(self._cache(14, key_tokens=2 * BLOCK, **layout))
        for index, step in enumerate(random_steps(seed, 60, _TRAFFIC)):
            driver.step(step)
            if step.request is not None and index % 3 == 0:
                prompt = driver.cache.geometry.prompt(step.request)
                for limit in range(prompt.cacheable + 1):
                    self._check_matches(driver.cache, prompt.keys, limit)

    @_layouts
    def test_decides_as_the_default(self, seed: int, layout: dict[str, Any]) -> None:
        """Random calls have the hits and evictions that they have with the default index."""
        self._needs_shares()
        steps = random_steps(seed, 120, _TRAFFIC)
        layout = {"key_tokens": 2 * BLOCK} | layout
        mine = Driver(self._cache(14, **layout)).run(steps)
        default = Driver(KVCache(14, eviction=Oldest(), ids=True, **layout)).run(steps)
        assert mine == default, "it decided otherwise than the default index"

    def test_keeps_its_integrity(self, seed: int) -> None:
        """Random calls keep the invariants of the cache, and refused calls change nothing."""
        driver = Driver(self._cache(14, key_tokens=2 * BLOCK))
        for step in random_steps(seed, 80, _TRAFFIC):
            driver.careful_step(step)

    def test_forgets_evicted_spans(self) -> None:
        """The index does not refer to evicted spans."""
        cache = self._cache(8)
        for index in range(_MANY):
            _serve(cache, chr(ord("a") + index) + "xyz")
        spans = {cache.tree.root, *cache.tree.spans()}
        gone = (span for span in living(Span) if span not in spans)
        kept = sum(span.geometry is cache.geometry for span in gone)
        assert kept <= _SLACK, f"it still refers to {kept} of {_MANY} evicted spans"

    def _check_matches(self, cache: KVCache, keys: Sequence[Key], limit: int) -> None:
        path = _path(cache, keys, limit)
        end = min(path[-1].end, limit)
        ratio = cache.geometry.ratio
        # The prompt may diverge inside the deepest span.
        while end > path[-1].start and (
            keys[(end - 1) // ratio] != path[-1].path_keys[(end - 1) // ratio]
        ):
            end -= 1
        for after in path:
            if after is path[-1]:
                continue
            match = cache.prefix.match(keys, limit, after)
            assert match == (path[-1], end), f"{keys} up to {limit} after {after!r}: {match}"

    def _cache(self, blocks: int = 12, block_size: int = BLOCK, **options: Any) -> KVCache:
        options = {"ids": True} | options
        prefix = _checked(self.make())
        return KVCache(blocks, block_size, eviction=Oldest(), prefix=prefix, **options)

    def _needs_shares(self) -> None:
        if not self.make().shares:
            pytest.skip(f"{type(self).__name__} tests an index that stores no blocks")


def _checked(prefix: PrefixIndex) -> PrefixIndex:
    """Return `prefix` with a class whose `match` checks that the span is cached."""
    cls = type(prefix)

    def match(
        self: PrefixIndex, keys: Sequence[Key], limit: int, after: Span
    ) -> tuple[Span, int]:
        span, end = cls.match(self, keys, limit, after)
        assert span.parent is not None or not span.id, (
            f"match() returned {span!r}, which has left the cache: remove() must forget it"
        )
        return span, end

    disguise(prefix, prefix, match=match)
    return prefix


def _path(cache: KVCache, keys: Sequence[Key], limit: int) -> list[Span]:
    """Return the spans on the path of `keys`, root first, by the links of the tree."""
    path, ratio = [cache.tree.root], cache.geometry.ratio
    while path[-1].end < limit:
        last = path[-1]
        if (
            last.end
            and keys[(last.end - 1) // ratio] != last.path_keys[(last.end - 1) // ratio]
        ):
            break
        child = (last.children or {}).get(keys[last.end // ratio])
        if child is None:
            break
        path.append(child)
    return path


def _ask(text: str, tokens: int | None = None, *, key_tokens: int = BLOCK) -> Request:
    """Return a request whose chained keys are the prefixes of `text`."""
    return Request(
        id=text,
        prompt_tokens=len(text) * key_tokens if tokens is None else tokens,
        keys=[text[:end] for end in range(1, len(text) + 1)],
        key_tokens=key_tokens,
    )


def _serve(
    cache: KVCache, *texts: str, tokens: int | None = None, key_tokens: int = BLOCK
) -> None:
    """Serve a request for each of `texts`, one after the other."""
    for text in texts:
        seq = cache.open(_ask(text, tokens, key_tokens=key_tokens))
        cache.commit(seq, seq.tokens - seq.computed)
        cache.check_integrity()
        cache.close(seq)
        cache.check_integrity()
