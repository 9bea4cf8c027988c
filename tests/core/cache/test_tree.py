"""The tree of spans: pins, commits, evictions, forks and expiry, with every prefix index."""

import pytest
from helpers.caches import BLOCK, ask, make, serve, start
from helpers.fake_policies import LIFETIME_NS, BookkeepingPolicy, ExpiringPolicy

from kvcore import OutOfBlocks, Span
from kvcore.testing.harness import Driver, Traffic, random_steps, snapshot
from kvcore_plugins.prefix import Hashed, NoPrefix, Radix

TRAFFIC = Traffic(key_tokens=2 * BLOCK, hints=True)
SHARING = [Radix, Hashed]


@pytest.fixture(params=SHARING)
def prefix(request):
    """Return a new prefix index of each kind that shares blocks."""
    return request.param()


@pytest.fixture(params=[*SHARING, NoPrefix])
def any_prefix(request):
    """Return a new prefix index of each kind."""
    return request.param()


def test_the_last_token_is_computed(prefix):
    """The last block of a fully cached prompt is computed again and freed at its commit."""
    cache = make(12, prefix=prefix)
    serve(cache, "abc")
    seq = cache.open(ask("abc"))
    cache.commit(seq, BLOCK)
    cache.check_integrity()
    assert (seq.hit_blocks, cache.tree.cached_blocks, seq.private_blocks) == (2, 3, 0)


def test_a_hit_shares_the_physical_blocks(prefix):
    """A hit shares the physical blocks of the sequence that computed them."""
    cache = make(12, prefix=prefix)
    first = start(cache, "abc")
    table = cache.block_table(first)
    cache.close(first)
    assert cache.block_table(cache.open(ask("abcd")))[:3] == table


def test_close_caches_the_committed_full_blocks(any_prefix):
    """After `close` committed full blocks are cached if the index shares; others are free."""
    cache = make(12, prefix=any_prefix)
    serve(cache, "abc", tokens=2 * BLOCK + 1)
    tree = cache.tree
    assert tree.cached_blocks == tree.unpinned_blocks == 2 * any_prefix.shares
    assert cache.pool.free_blocks == cache.pool.blocks - tree.cached_blocks


def test_pinned_blocks_are_not_evicted(any_prefix):
    """Blocks of open sequences are never evicted: an admission raises OutOfBlocks."""
    cache = make(8, prefix=any_prefix)
    held = [start(cache, text) for text in ("abcd", "abcx")]
    with pytest.raises(OutOfBlocks):
        cache.open(ask("lmnopqr"))
    for seq in held:
        cache.close(seq)
    cache.open(ask("lmnopqr"))
    cache.check_integrity()


def test_a_refused_open_changes_nothing(any_prefix):
    """An `open` that raises OutOfBlocks leaves pins, spans and blocks unchanged."""
    cache = make(8, prefix=any_prefix)
    serve(cache, "abc")
    start(cache, "xyz")
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks):
        cache.open(ask("abmnopqr"))
    assert snapshot(cache) == before


def test_a_refused_extend_changes_nothing(any_prefix):
    """An `extend` that raises OutOfBlocks allocates no block."""
    cache = make(8, prefix=any_prefix)
    serve(cache, "abc")
    seq = start(cache, "xyz")
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks):
        cache.extend(seq, 6 * BLOCK)
    assert snapshot(cache) == before


def test_only_as_many_blocks_as_needed_are_evicted(prefix):
    """Only as many blocks as needed are evicted; the rest of the victim still hits."""
    cache = make(8, prefix=prefix)
    serve(cache, "abcd", "xy")
    cache.open(ask("lmnop"))
    cache.check_integrity()
    assert (cache.tree.evicted_blocks, cache.pool.free_blocks) == (3, 0)
    assert [cache.probe(ask(text)) for text in ("xyz", "abcde")] == [2, 1]


def test_an_admission_does_not_evict_the_blocks_that_it_hits(prefix):
    """An admission does not evict the blocks that it hits."""
    cache = make(6, prefix=prefix)
    serve(cache, "abc", "xyz")
    seq = cache.open(ask("abclmn"))
    distinct = len(set(cache.block_table(seq)))
    assert (seq.hit_blocks, cache.tree.evicted_blocks, distinct) == (3, 3, 6)


def test_duplicates_are_freed(prefix):
    """Two sequences that compute the same prompt end with one copy of it."""
    cache = make(12, prefix=prefix)
    one, two = cache.open(ask("abc")), cache.open(ask("abc"))
    for seq in (one, two):
        cache.commit(seq, 3 * BLOCK)
        cache.check_integrity()
    assert cache.block_table(one) == cache.block_table(two)
    assert cache.tree.cached_blocks == cache.pool.blocks - cache.pool.free_blocks == 3


def test_blocks_of_a_fork_stay_until_both_sequences_close(any_prefix):
    """Blocks that a fork shares stay until both sequences have closed."""
    cache = make(6, prefix=any_prefix)
    seq = start(cache, "abc")
    child = cache.fork(seq)
    assert cache.block_table(child) == cache.block_table(seq)
    cache.close(seq)
    cache.check_integrity()
    with pytest.raises(OutOfBlocks):
        cache.open(ask("lmno"))
    cache.close(child)
    cache.check_integrity()
    cache.open(ask("lmno"))


def test_blocks_of_a_fork_are_committed_for_both_sequences(any_prefix):
    """Blocks that a fork shares are cached once, or stay private to both sequences."""
    cache = make(12, prefix=any_prefix)
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    for each in (seq, child):
        cache.commit(each, 3 * BLOCK)
        cache.check_integrity()
    assert cache.block_table(child) == cache.block_table(seq)
    assert cache.pool.free_blocks == cache.pool.blocks - 3


def test_expired_spans_do_not_match(prefix):
    """Expired spans do not hit. An admission drops them; a probe changes nothing."""
    cache = make(8, ExpiringPolicy(), prefix=prefix)
    serve(cache, "abc")
    before = snapshot(cache)
    found = [cache.probe(ask("abcd"), now) for now in (LIFETIME_NS - 1, LIFETIME_NS)]
    assert (found, snapshot(cache)) == ([3, 0], before)
    cache.open(ask("abcd"), now=LIFETIME_NS)
    cache.check_integrity()
    assert (cache.tree.cached_blocks, cache.tree.expired_blocks) == (0, 3)


def test_spans_are_yielded_after_their_parents(prefix):
    """`spans()` yields every span after its parent, with all cached blocks in sum."""
    cache = make(24, prefix=prefix)
    serve(cache, "ab", "abcd", "abxy", "lmn")
    seen: set[Span] = set()
    for span in cache.tree.spans():
        assert span.parent in seen or span.parent is cache.tree.root
        seen.add(span)
    assert sum(span.blocks for span in seen) == cache.tree.cached_blocks


@pytest.mark.parametrize("seed", range(4))
def test_the_hooks_of_a_policy_report_every_change(seed, prefix):
    """Spans, their sizes and pins can be tracked from the policy's hooks alone."""
    ledger = BookkeepingPolicy()
    cache = make(14, ledger, prefix=prefix, key_tokens=2 * BLOCK)
    driver = Driver(cache)
    for step in random_steps(seed, 80, TRAFFIC):
        driver.step(step)
        spans = list(cache.tree.spans())
        assert ledger.sizes == {span: span.blocks for span in spans}
        assert ledger.pinned & set(spans) == {span for span in spans if span.ref_count}


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_without_ids_decides_as_one_with_ids(seed, any_prefix):
    """A pool without block ids gives the same hits and evictions as one with ids."""
    steps = random_steps(seed, 80, TRAFFIC)
    runs = [
        Driver(make(14, prefix=type(any_prefix)(), key_tokens=2 * BLOCK, ids=ids)).run(steps)
        for ids in (True, False)
    ]
    assert runs[0] == runs[1]
