"""The tree of spans with every prefix index: its order, its hooks, and pools without ids."""

import pytest
from helpers.caches import BLOCK, ask, make, serve, spell, start
from helpers.fake_policies import BookkeepingPolicy

from kvcore import Span
from kvcore.testing.harness import Driver, Traffic, random_steps
from kvcore_plugins.prefix import Hashed, Radix

TRAFFIC = Traffic(key_tokens=2 * BLOCK, hints=True)
SHARING = [Radix, Hashed]


@pytest.fixture(params=SHARING)
def prefix(request):
    """Return a new prefix index of each kind that shares blocks."""
    return request.param()


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


def test_spans_of_one_block_are_stored_up_to_the_last():
    """With spans of one block, all blocks that are computed at once are cached."""
    cache = make(prefix=Hashed(spans="block"))
    serve(cache, "abcd")
    assert [spell(span) for span in cache.tree.spans()] == ["|a", "a|b", "ab|c", "abc|d"]


def test_spans_that_are_discarded_leave_but_for_pinned_ones():
    """Below a discarded span what a sequence holds stays, with what is above it."""
    cache = make()
    serve(cache, "ab", "abuv")
    seq = start(cache, "abcd")
    (top,) = cache.tree.root.children.values()
    cache.tree.discard(top, 0, "gone")
    assert [cache.probe(ask(text)) for text in ("abuv!", "abcd!")] == [2, 4]
    cache.close(seq)
    cache.check_integrity()


def test_a_span_has_the_keys_that_cover_it():
    """Of keys of two blocks, a span has those of its own blocks, not those above it."""
    cache = make(key_tokens=2 * BLOCK)
    serve(cache, "a", "abc", key_tokens=2 * BLOCK)
    assert [span.keys() for span in cache.tree.spans()] == [["a"], ["ab", "abc"]]
    serve(cache, "abx", key_tokens=2 * BLOCK)
    keys = [span.keys() for span in cache.tree.spans()]
    assert sorted(keys) == [["a"], ["ab"], ["abc"], ["abx"]]


def test_the_span_at_which_paths_begin_is_empty():
    """Above the first span of each path is one without blocks, and nothing is before that."""
    cache = make()
    serve(cache, "ab")
    (top,) = cache.tree.spans()
    assert (top.parent.depth, top.parent.blocks, top.parent.turn) == (0, 0, 0)
