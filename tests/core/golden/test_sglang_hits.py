"""The hits of SGLang's radix caches on a production trace, request by request.

The figures are those of SGLang 0.5.23: `RadixCache`, and `UnifiedRadixCache` with both of its
cores, which agree. `tox -e like-sglang` compares them with the package.
"""

from __future__ import annotations

import pytest
from helpers.cache_streams import CONVERSATION, STREAMS, KvcoreCache, digest, hits_of


@pytest.mark.parametrize("stream", STREAMS[CONVERSATION], ids=str)
def test_each_request_hits_as_in_sglang(stream):
    """Each request hits as many blocks under `--like sglang` as in SGLang."""
    ours = KvcoreCache.like("sglang", stream.blocks)
    assert digest(hits_of(stream, ours)) == STREAMS[CONVERSATION][stream]


@pytest.mark.parametrize(
    ("rule", "more"), [({"prefix": "radix"}, 263), ({"eviction": "lru"}, 587)], ids=str
)
def test_each_rule_of_sglang_changes_the_hits(rule, more):
    """Without SGLang's prefix rule or eviction rule, the pool of 8,192 blocks hits more."""
    stream = next(stream for stream in STREAMS[CONVERSATION] if stream.blocks == 8192)
    ours = KvcoreCache.like("sglang", stream.blocks, **rule)
    assert sum(hits_of(stream, ours)) - STREAMS[CONVERSATION][stream][0] == more
