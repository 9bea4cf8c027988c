"""The eviction policy `hazard`, which learns which prefixes are asked for again, and when."""

import json
from functools import partial
from random import Random

import pytest
from helpers.caches import ask, make, spans
from helpers.reuse import KEY_TOKENS, flips, recency

from kvcore import InputError, KVCache, Plugins
from kvcore.testing.hosted import HostedCache
from kvcore_plugins.eviction import LRU, Hazard, WorkloadAware
from kvcore_plugins.eviction.survival import indices
from kvcore_replay.untimed import replay, served

SECOND = 10**9

FREE = partial(Hazard, guard=False)


def prompt(text, seconds, answer):
    """Return a request at a time in seconds with an answer of so many tokens."""
    return ask(text, arrival=seconds * SECOND, output_tokens=answer)


def lessons(count):
    """Return prompts with long answers, which return after a minute, and others."""
    requests = []
    for index in range(count):
        long, short = chr(2000 + 2 * index), chr(2001 + 2 * index)
        start = 200 * index
        requests += [prompt(long, start, 1000), prompt(short, start + 1, 10)]
        requests.append(prompt(long + "z", start + 61, 10))
    return requests


def kept(eviction, requests, blocks=4, prefix=None):
    """Return the cached spans after `requests`, served one after the other."""
    cache = make(blocks, eviction, accounting="keys", prefix=prefix)
    replay(requests, cache)
    cache.check_integrity()
    return set(spans(cache))


def hits(eviction, requests, blocks, prefix=None, block_size=512):
    """Return the blocks that hit in an untimed replay."""
    cache = KVCache(blocks, block_size, eviction=eviction, accounting="keys", prefix=prefix)
    return replay(requests, cache).hit_blocks


@pytest.fixture(scope="module")
def conversation():
    """Return the bundled trace."""
    return list(Plugins().build("workload", "mooncake"))


def test_it_keeps_what_returns_and_lru_what_is_recent():
    """A prompt of a class that returns outlives a recent one of a class that does not."""
    requests = [
        *lessons(60), prompt("ab", 20_000, 1000), prompt("cd", 20_010, 10),
        prompt("x", 20_040, 10), prompt("y", 20_041, 10),
    ]  # fmt: skip
    assert "|ab" in kept(FREE(), requests)
    assert "|ab" not in kept(LRU(), requests)


def forks(count):
    """Return prompts that return without their last block, as partial blocks do."""
    texts = [(chr(2000 + index), 100 * index) for index in range(count)]
    return [prompt(t + end, s + (end == "q"), 1) for t, s in texts for end in "pq"]


def test_last_keys_that_never_return_leave_first():
    """Where last blocks do not return, that of each prompt leaves before the rest of any."""
    requests = [*forks(60), prompt("abc", 9000, 1), prompt("def", 9001, 1)]
    requests.append(prompt("xy", 9060, 1))
    assert kept(FREE(), requests, 6) == {"|ab", "|de", "|xy"}
    assert kept(LRU(), requests, 6) == {"|a", "|def", "|xy"}


def test_the_guard_begins_as_lru(conversation):
    """Until the shadows have shown a gain every hit is that of LRU."""
    requests = conversation[:200]
    assert hits(Hazard(), requests, 1000) == hits(LRU(), requests, 1000)


def test_the_guard_ends_what_loses():
    """Where the order by index hits less than LRU, the guard keeps within one per cent."""
    requests = recency(0, 4000)
    for blocks in (500, 2000):
        lru = hits(LRU(), requests, blocks, block_size=KEY_TOKENS)
        assert hits(Hazard(), requests, blocks, block_size=KEY_TOKENS) >= 0.99 * lru


@pytest.mark.parametrize("blocks", [1000, 10_000])
def test_the_guard_counts_the_hits_of_lru(blocks, conversation):
    """While it evicts as LRU, its shadow of LRU hits what the pool does, within 3 %."""
    cache = KVCache(blocks, 512, eviction="hazard", accounting="keys")
    shadow = cache.eviction._guard._lru
    counted = []
    hits_of_request = shadow.hits
    shadow.hits = lambda blocks: counted.append(hits_of_request(blocks)) or counted[-1]
    replay(conversation[:1500], cache)
    assert cache.eviction._guard.is_lru
    assert sum(counted) == pytest.approx(cache.stats.hit_blocks, rel=0.03)


@pytest.mark.parametrize("seed", [4, 13])
def test_the_guard_is_not_misled_by_chance(seed):
    """In a pool of two prompts of equal popularity it hits no less than LRU within 1 %."""
    requests = list(Plugins().build("workload", f"zipf:requests=6000,skew=0,seed={seed}"))
    lru = hits(LRU(), requests, 304, block_size=16)
    assert hits(Hazard(), requests, 304, block_size=16) >= 0.99 * lru


@pytest.mark.parametrize(("first", "blocks"), [(500, 4000), (1000, 4000), (1000, 6000)])
def test_the_guard_is_not_misled_by_a_few_long_prompts(first, blocks, conversation):
    """Early gains of a few long prompts do not end LRU: the next requests would lose more."""
    requests = conversation[:first]
    assert hits(Hazard(), requests, blocks) >= hits(LRU(), requests, blocks)


@pytest.mark.parametrize("blocks", [4000, 8000])
def test_it_follows_a_meaning_that_flips(blocks):
    """Where classes swap meanings each hour, second halves of hours lose nothing to LRU."""
    requests = flips(1, 4)

    def late(eviction):
        cache = KVCache(blocks, KEY_TOKENS, eviction=eviction, accounting="keys")
        return sum(
            seq.hit_blocks
            for seq in served(requests, cache)
            if seq.request.arrival // SECOND % 3600 >= 1800
        )

    assert late(Hazard()) >= 0.99 * late(LRU())


HITS = {"lru": 18_850, "hazard": 34_714, "hazard:guard=false": 35_504, "workload-aware": 30_377}


@pytest.mark.parametrize("name", HITS)
def test_hits_on_the_bundled_trace(name, conversation):
    """In 3,000 blocks each policy hits what it hit when its rules were set."""
    assert hits(name, conversation, 3000) == HITS[name]


def test_a_span_for_each_block_changes_little(conversation):
    """With one span a block, as in engines, the gain over LRU is within a tenth of its hits."""
    requests = conversation[:2500]
    runs, each = (
        hits(FREE(), requests, 2000, prefix) for prefix in (None, "hashed:spans=block")
    )
    lru = hits(LRU(), requests, 2000)
    assert abs(each - runs) <= 0.1 * lru
    assert min(each, runs) > 1.3 * lru


def test_it_gains_where_leaves_are_evicted_whole(conversation):
    """Where a leaf leaves whole, as in SGLang, its last key takes nothing else with it."""
    requests, prefix = conversation[:6000], "radix:evict=leaf"
    assert hits(FREE(), requests, 2000, prefix) > 1.3 * hits(LRU(), requests, 2000, prefix)


def test_a_host_of_single_blocks_hits_what_a_cache_of_them_hits(conversation):
    """A host evicts spans whole: that of a last key, which is all of it, goes as in a cache."""
    requests, hosted, hit = conversation[:1500], HostedCache(FREE(), 500, 512, None), 0
    for request in requests:
        opened = hosted.open(request, None, request.arrival)
        hosted.commit(opened, opened.tokens - opened.computed, request.arrival)
        hosted.close(opened, request.arrival)
        hit += opened.hit_blocks
    assert hit == hits(FREE(), requests, 500, "hashed:spans=block")


def test_saved_counts_are_where_a_run_goes_on(tmp_path, conversation):
    """A run that loads the counts of another begins with what that has learned."""
    path = tmp_path / "counts.json"
    hits(FREE(save=str(path)), conversation[:6000], 1000)
    requests = conversation[6000:7000]
    assert hits(FREE(load=str(path)), requests, 1000) > hits(FREE(), requests, 1000)
    assert not list(tmp_path.glob("*.part"))


def damaged(document, **changes):
    """Return the text of `document` with changed fields."""
    return json.dumps(document | changes)


def test_damaged_counts_are_refused(tmp_path):
    """A file that is damaged, or of another version or other classes, is refused by name."""
    path = tmp_path / "counts.json"
    requests = lessons(20)
    kept(FREE(save=str(path)), requests)
    text = path.read_text()
    document = json.loads(text)
    tables = document["tables"]
    classes = tables["classes"]
    for wrong, why in (
        (text[:-9], "has no counts"),
        ("[]", "has no counts"),
        (damaged(document, version=2), "version 2"),
        (damaged(document, policy="other"), "is of other"),
        (damaged(document, options="by=turns+hits"), "with by=turns"),
        (damaged(document, tables=tables | {"all": []}), "is damaged"),
        (damaged(document, tables=tables | {"classes": classes * 2}), "is damaged"),
        (damaged(document, tables=tables | {"last": [[[], [-1, 1]]]}), "is damaged"),
        (damaged(document, tables=tables | {"last": [[[], [1]]]}), "is damaged"),
        (damaged(document, tables={"classes": classes}), "is damaged"),
        (damaged(document, tables=None), "is damaged"),
    ):
        path.write_text(wrong)
        with pytest.raises(InputError, match=why):
            Hazard(load=str(path))
    with pytest.raises(InputError, match="cannot be read"):
        Hazard(load=str(tmp_path))


@pytest.mark.parametrize("options", [{"prior": 0}, {"by": "turns+age"}, {"by": "turns+turns"}])
def test_wrong_options_are_refused(options):
    """A prior of no weight, and parts that are unknown or repeated, are refused."""
    with pytest.raises(InputError, match=r"hazard: (prior|by)="):
        Hazard(**options)


WIDTHS = [1.0] * 30


def test_the_index_is_the_best_ratio_over_all_ages_to_give_up():
    """The index of each bucket is the maximum that a search over all later ages finds."""
    draw = Random(3)
    for _ in range(50):
        hazards, widths = ([draw.random() for _ in range(12)] for _ in range(2))
        hazards = [hazard / 2 for hazard in hazards]
        for start, index in enumerate(indices(hazards, widths)):
            best = chance = seconds = 0.0
            alive = 1.0
            for hazard, width in zip(hazards[start:], widths[start:], strict=True):
                seconds += alive * width * (1 - hazard / 2)
                chance += alive * hazard
                alive *= 1 - hazard
                best = max(best, chance / seconds)
            assert index == pytest.approx(best, rel=1e-3)


def test_the_index_of_what_surely_ends_is_finite():
    """Where nearly all waits end in each bucket, even the last has an index."""
    assert all(0 < index < float("inf") for index in indices([1.0] * 30, WIDTHS))


def test_workload_aware_keeps_the_type_that_returns():
    """A prompt of a type that returns outlives a more recent one of a type that does not."""
    requests = []
    for index in range(60):
        start = 200 * index
        texts = ((chr(2000 + 2 * index), "a", 0), (chr(2001 + 2 * index), "b", 1))
        requests += [ask(t, arrival=(start + s) * SECOND, tenant=n) for t, n, s in texts]
        again = texts[0][0] + "z"
        requests.append(ask(again, arrival=(start + 20) * SECOND, tenant="c"))
    for text, name, second in (("pq", "a", 0), ("rs", "b", 5), ("x", "c", 10), ("y", "c", 11)):
        requests.append(ask(text, arrival=(20_000 + second) * SECOND, tenant=name))
    assert "|pq" in kept(WorkloadAware(), requests)
    assert "|pq" not in kept(LRU(), requests)


@pytest.mark.parametrize(
    "options", [{"type": "model"}, {"turns": 0}, {"window": 0}, {"history": -1}]
)
def test_wrong_options_of_workload_aware_are_refused(options):
    """Options out of range are refused by name."""
    with pytest.raises(InputError, match=f"workload-aware: {next(iter(options))}="):
        WorkloadAware(**options)
