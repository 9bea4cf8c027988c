"""SGLang's real cache of hybrid models beside the pools of kvcore, call by call.

`tox -e like-sglang` runs this with the installed package. `KVCORE_LIKE_STREAMS` is the number
of random streams of each kind, and `KVCORE_LIKE_FIRST` the first seed.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec

import pytest
from helpers.pool_streams import drive

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from helpers.sglang_pools import SglangSide

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the package

FIRST = int(os.environ.get("KVCORE_LIKE_FIRST", "0"))
STREAMS = int(os.environ.get("KVCORE_LIKE_STREAMS", "60"))


@pytest.mark.parametrize("kind", ["window", "state"])
def test_pools_decide_as_sglangs_cache(kind):
    """Hits, free and evictable slots, and evicted blocks are those of SGLang."""
    counts = Counter()
    for seed in range(FIRST, FIRST + STREAMS):
        calls, hits, evicted, _ = drive(seed, kind, SglangSide)
        counts += Counter(streams=1, calls=calls, hits=hits, evicted=evicted)
    print(f"\nstreams with a {kind}:", dict(counts))  # noqa: T201 - the figures of the claim
    assert counts["streams"] == STREAMS
