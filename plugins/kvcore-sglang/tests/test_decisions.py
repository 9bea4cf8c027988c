"""Hits and evictions of SGLang's caches under policies of kvcore.

They equal those of SGLang's own policies, and those of a replay in kvcore.
"""

import json
from random import Random

import pytest
from helpers.commands import run_here
from helpers.engines import required

required("sglang")
required("kvcore_sglang")

from helpers.cache_streams import CONVERSATION, KvcoreCache, Stream, hits_of  # noqa: E402
from helpers.hosted_trees import hosted, in_kvcore, in_sglang  # noqa: E402
from helpers.sglang_engine import SglangCache  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

from kvcore import Request  # noqa: E402
from kvcore_sglang.host import chain  # noqa: E402

load_plugins()

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of SGLang itself

CORES = ("radix", "python")
KINDS = ((1, False), (16, False), (16, True))
STREAMS = [
    Stream(CONVERSATION, blocks, opened, generates, 500)
    for blocks in (2048, 4096)
    for opened, generates in KINDS
]
WHOLE = Stream(CONVERSATION, 8192, 16, generates=True)
THEIRS = {"lru": "lru", "lfu": "lfu:half_life=inf", "slru": "slru:protected=1"}
"""Policies of SGLang, and those of kvcore that decide the same where splits renew."""

POLICIES = (
    "lru", "lru:renew_split=true", "lfu",
    "lfu:half_life=inf", "lfu:half_life=2000,unit=accesses",
    "slru", "sieve", "s3fifo", "arc", "tinylfu", "lruk", "fifo", "mru", "random", "priority",
)  # fmt: skip
OF_TOKENS = ("cost", "tail-lru")
"""Policies that count tokens, and so depend on how many a block has."""


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("stream", STREAMS, ids=str)
@pytest.mark.parametrize("policy", THEIRS)
def test_a_policy_decides_as_sglangs_own(policy, stream, core):
    """Hits and victims, in order, are those under SGLang's own policy of that name."""
    own = in_sglang(stream, core, policy)
    assert own[1], "nothing was evicted"
    assert hosted(stream, core, THEIRS[policy], renew_split=True) == own


@pytest.mark.parametrize("policy", THEIRS)
def test_a_policy_decides_as_sglangs_own_over_the_whole_trace(policy):
    """Hits and victims equal those of SGLang's own policy over all 12,031 requests."""
    config = {"renew_split": True}
    assert hosted(WHOLE, "radix", THEIRS[policy], **config) == in_sglang(WHOLE, "radix", policy)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_decides_as_in_a_replay(policy, core):
    """Hits and victims in SGLang equal those in kvcore's model of the cache."""
    for stream in STREAMS[2::3] if core == "python" else STREAMS:
        assert hosted(stream, core, policy) == in_kvcore(stream, policy), stream


def requests(seed):
    """Yield requests that share prefixes, with one key for each token."""
    draw = Random(seed)
    stems = [[1000 * name + index for index in range(40)] for name in range(1, 8)]
    for number in range(200):
        stem = draw.choice(stems)
        own = [10_000 + 100 * number + index for index in range(draw.randint(1, 20))]
        keys = [*stem[: draw.randint(0, len(stem))], *own]
        yield Request(
            id=number, prompt_tokens=len(keys), output_tokens=draw.randint(1, 12), keys=keys,
            key_tokens=1,
        )  # fmt: skip


class Random200(Stream):
    """A stream of 200 random requests; its workload is the seed."""

    def requests(self):
        """Return an iterator over the requests."""
        return requests(self.workload)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", [*POLICIES, *OF_TOKENS])
def test_random_streams_decide_as_in_a_replay(policy, core):
    """Random streams hit in SGLang as in kvcore, also under policies that count tokens."""
    for seed in range(4):
        for opened, generates in KINDS:
            stream = Random200(seed, 150, opened, generates)
            ours = KvcoreCache(150, 1, policy, "radix:evict=leaf")
            theirs = SglangCache(150, core, "kvcore", {"eviction": policy})
            assert hits_of(stream, ours) == hits_of(stream, theirs), (seed, str(stream))
            assert theirs.host.failure is None
            assert ours.cache.tree.evicted_blocks == theirs.host.evicted > 0


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_decisions_are_recorded(kind, core, tmp_path, monkeypatch):
    """A recording has all hits and evictions, and `kvcore replay` accepts it."""
    path = tmp_path / "day.jsonl"
    monkeypatch.setenv("KVCORE_TRACE", str(path))
    stream = Random200(1, 150, *kind)
    theirs = SglangCache(150, core, "kvcore", {"eviction": "sieve"})
    theirs.host.chain = chain  # keys of tokens, as in a server
    hits = hits_of(stream, theirs)
    recorder = theirs.host.recorder
    recorder.close()
    assert recorder.failure is None
    assert not recorder.disagreements
    shown = run_here("replay", path, "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["evictions"]["blocks"] == recorder.evictions.blocks > 0
    assert found["evictions"]["digest"] == recorder.evictions.hexdigest
    assert sum(hits) == found["hit"]["hit_blocks"]
