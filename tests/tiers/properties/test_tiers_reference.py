"""Tiers against a slow model, block by block and to the nanosecond."""

from collections import Counter

import attrs
from helpers.reference.levels import Hierarchy
from helpers.reference.random_tiers import prefill_ns, random_tiers, tier_text
from helpers.serving import BLOCK, SLOT, ask
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache
from kvcore_tiers.hierarchy import Tiers

ROWS = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 3), st.integers(0, 400))
"""A prompt's branch, blocks, tokens after these, and ns since the last prompt."""

TIERS = random_tiers((4, 1, 9, 16, 100), [SLOT * 10**exponent for exponent in (9, 8, 7)])


def path_of(span):
    """Return the blocks of a span, each as the keys of its path."""
    return [tuple(span.path_keys[:end]) for end in range(span.start + 1, span.end + 1)]


def counts_of(level):
    """Return the statistics of a level that are not 0, except for blocks it did not write."""
    stats, link = attrs.asdict(level.stats), level.link
    left_out = stats.pop("skipped"), stats.pop("refused")
    assert min(left_out) >= 0
    assert link.read_bytes == SLOT * stats["loaded"]
    assert link.written_bytes == SLOT * stats["stored"]
    return +Counter(stats.pop("dropped") | stats | {"busy_ns": link.busy_ns})


@given(rows=st.lists(ROWS, min_size=8, max_size=40), rules=TIERS)
def test_tiers_equal_the_slow_model(rows, rules):
    """Hits, loads, times of links, statistics and contents equal the slow model's."""
    pool = 11
    cache = KVCache(pool, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [tier_text(tier, SLOT) for tier in rules], SLOT)
    slow = Hierarchy(pool, BLOCK, [tier | {"slot": SLOT} for tier in rules], prefill_ns)
    now = 0
    for index, (branch, blocks, more, wait) in enumerate(rows):
        now += wait
        tokens = blocks * BLOCK + more + 1
        keys = [100 * branch + index for index in range(tokens // BLOCK)]
        hit, loaded, ready = slow.serve(keys, tokens, now)
        seq = cache.open(ask(index, prompt=tokens, keys=keys), now=now)
        load = tiers.load(seq, now, prefill_ns)
        found = 0 if load is None else load.tokens // BLOCK - seq.hit_blocks
        assert (seq.hit_blocks, found) == (hit, loaded)
        if load is not None:
            assert load.ready == ready
            tiers.finish(load, ready)
        now = ready + prefill_ns(tokens - seq.computed, seq.computed)
        cache.commit(seq, tokens - seq.computed, now)
        cache.close(seq, now)
        cache.check_integrity()
        trees = [cache.tree, *(level.tree for level in tiers.levels)]
        for tree, memory in zip(trees, slow.memories, strict=True):
            assert {b for span in tree.spans() for b in path_of(span)} == set(memory.used)
        for level, memory in zip(tiers.levels, slow.memories[1:], strict=True):
            assert level.link.free_at == memory.free_at
            assert counts_of(level) == +memory.counts
