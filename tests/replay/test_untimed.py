"""Untimed replay: requests admitted, committed and closed one by one."""

from __future__ import annotations

import pytest
from helpers.caches import ask, make

from kvcore_replay.untimed import replay


def test_the_times_of_a_span_are_the_arrivals_of_its_requests():
    """The times of a span are the arrivals of the requests that created and hit it."""
    cache = make(8, accounting="keys")
    replay([ask("a", arrival=7), ask("a", arrival=9)], cache)
    (span,) = cache.tree.spans()
    assert (span.created, span.last_access) == (7, 9)


@pytest.mark.parametrize("count", ["keys", "tokens"])
def test_a_request_longer_than_the_pool_keeps_its_leading_blocks(count):
    """A request longer than the pool leaves its leading blocks cached.

    All of its blocks are looked up.
    """
    cache = make(2, accounting=count)
    stats = replay([ask("abcd"), ask("abcd")], cache)
    assert (cache.tree.cached_blocks, stats.lookup_blocks, stats.hit_blocks) == (2, 8, 2)
