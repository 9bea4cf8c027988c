"""Tiers below cache groups against a slow model, block by block and to the nanosecond."""

import io
from collections import Counter
from itertools import pairwise

import attrs
import orjson
from helpers.reference.group_levels import Memory, longest, needed
from helpers.reference.random_tiers import prefill_ns, random_tiers, tier_text
from helpers.serving import ask
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Trace
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_tiers.grouped import GroupTiers

SLOT, UNIT, CHUNK = 64, 4, 24

FULL, STATE = LayerGroup("full", UNIT, layers=2), LayerGroup("state", UNIT)

GROUPS = {
    "full, window": [FULL, LayerGroup("window", UNIT, 10, layers=2)],
    "window, full, short window": [
        LayerGroup("window", UNIT, 18), FULL, LayerGroup("window", UNIT, 5, layers=2),
    ],
    "full, two states": [FULL, STATE, STATE],
    "full, window, state": [FULL, LayerGroup("window", UNIT, 9), STATE],
    "blocks of two sizes": [
        LayerGroup("full", 2 * UNIT), LayerGroup("window", UNIT, 12, layers=2),
    ],
}  # fmt: skip

ROWS = st.tuples(st.integers(0, 2), st.integers(0, 16), st.integers(0, 3), st.integers(0, 800))
"""A prompt's branch, keys, tokens after these, and ns since the last prompt."""

TIERS = random_tiers((12, 3, 30, 200), [SLOT * 10**exponent // 2 for exponent in (9, 8, 7)])


class Watched(GroupedCache):
    """A cache that tells a slow model what happens in its pool."""

    first: Memory

    def _evict(self, blocks):
        if self.first.rules["write"] == "evict":
            self.first.store([self._blocks.place(block) for block in blocks], self.now)
        for block in blocks:
            self.first.hits.pop(self._blocks.place(block), None)
        super()._evict(blocks)

    def _stored(self, seq, group, copies):
        super()._stored(seq, group, copies)
        names = seq.names[self.groups[group].block_size].at(list(copies))
        if self.first.rules["write"] == "through":
            self.first.store([(group, name) for name in reversed(names)], self.now)


@given(
    shape=st.sampled_from(sorted(GROUPS)),
    rows=st.lists(ROWS, min_size=8, max_size=40),
    rules=TIERS,
)
def test_tiers_of_groups_equal_the_slow_model(shape, rows, rules):
    """Hits, loads, times of links, statistics and contents equal the slow model's.

    The trace has all that moves.
    """
    groups, file = GROUPS[shape], io.BytesIO()
    trace = Trace(file)
    cache = Watched(groups, 44, key_tokens=UNIT, trace=trace)
    tiers = GroupTiers(cache, [tier_text(tier, SLOT) for tier in rules], SLOT)
    sizes = [SLOT * group.layers // 2 for group in groups]
    slow = [Memory(rule, sizes) for rule in rules]
    for memory, below in pairwise(slow):
        memory.below = below
    cache.first, cache.in_flight_tokens, now = slow[0], CHUNK, 0
    for index, (branch, blocks, more, wait) in enumerate(rows):
        now += wait
        tokens = blocks * UNIT + more + 1
        keys = [100 * branch + index for index in range(tokens // UNIT)]
        now = serve(cache, tiers, slow, ask(index, prompt=tokens, keys=keys), now)
        cache.check_integrity()
        tiers.check_integrity()
        for level, memory in zip(tiers.levels, slow, strict=True):
            assert {place for _, place in level.slots} == set(memory.used)
            assert level.link.free_at == memory.free_at
            stats = attrs.asdict(level.stats)
            # Blocks are not moved one by one: how many transfers there are is told elsewhere.
            del stats["loads"]
            counts = stats.pop("dropped") | stats | {"busy_ns": level.link.busy_ns}
            assert +Counter(counts) == +memory.counts
    trace.close()
    told = Counter()
    for line in map(orjson.loads, file.getvalue().splitlines()):
        if "tier" in line:
            told[line["tier"], line["event"]] += line["blocks"]
            told[line["tier"], "loads"] += line["event"] == "LOAD_START"
    for level in tiers.levels:
        stats, name = level.stats, level.name
        assert told[name, "OFFLOAD"] == stats.stored
        assert told[name, "LOAD_START"] == told[name, "LOAD"] == stats.loaded
        assert told[name, "loads"] == stats.loads
        assert told[name, "DROP"] == sum(stats.dropped.values())


def serve(cache, tiers, slow, request, now):
    """Serve a request in both, alone; return the time at which it ends."""
    groups, target, pool = cache.groups, request.prompt_tokens, set()
    match = cache.match(request)
    seq = cache.open(request, 0, now, match=match)
    texts = [
        seq.names[group.block_size].at(range(target // group.block_size)) for group in groups
    ]
    pool = {place for _, place in cache._blocks}
    hit = longest(groups, texts, target, pool)
    assert match.tokens == hit
    for index, _ in enumerate(groups):
        own = [b for b in needed(groups, texts, hit) if b and b[0] == index]
        slow[0].hit(own[::-1], now)
    parts, end = find(slow, groups, texts, target, pool, hit, now)
    unit = cache.geometry.block_size
    ready = begin(parts, now, (end - hit) // unit, seq.lookup_blocks)
    load = tiers.load(seq, now, prefill_ns)
    assert (hit if load is None else load.tokens) == end
    if load is not None:
        assert load.ready == ready
        tiers.check_integrity()
        finish(parts)
        tiers.finish(load, ready)
    now = ready
    while seq.computed < target:
        chunk = cache.chunk_tokens(
            seq.computed,
            min(CHUNK, target - seq.computed),
            target,
            target,
            seq.boundaries,
            CHUNK,
        )
        cache.extend(seq, chunk, now)
        now += prefill_ns(chunk, seq.computed)
        cache.commit(seq, chunk, now)
    cache.close(seq, now)
    return now


def find(slow, groups, texts, target, pool, hit, now):
    """Return the blocks that each tier loads, and the tokens that are there then."""
    asked = [memory for memory in slow if memory.rules["load"] != "never"]
    there = pool.union(*(memory.used for memory in asked))
    end = longest(groups, texts, target, there)
    missing = [block for block in needed(groups, texts, end) if end > hit and block not in pool]
    parts = []
    for memory in asked:
        parts.append((memory, [block for block in missing if block in memory.used]))
        missing = [block for block in missing if block not in memory.used]
    parts = [(memory, own) for memory, own in parts if own]
    if not parts:
        return [], hit
    loading = max(
        max(memory.free_at - now, 0) + memory.takes(own, "read") + memory.rules["latency"]
        for memory, own in parts
    )
    took = loading + prefill_ns(target - end, end)
    always = any(memory.rules["load"] == "always" for memory, _ in parts)
    for memory, own in parts:
        memory.counts["found"] += len(own)
    if took > prefill_ns(target - hit, hit) and not always:
        for memory, own in parts:
            memory.counts["recomputed"] += len(own)
        return [], hit
    return parts, end


def begin(parts, now, gain, lookup):
    """Queue the loads of `parts`; return the time at which they are done.

    Of `lookup` blocks that are whole in all groups they have `gain`, which are hits of the
    farthest tier.
    """
    ready = now
    if parts:
        parts[-1][0].counts.update(hits=gain, ratio_sum=gain / lookup)
    for memory, own in parts:
        memory.kept.update(own)
    for memory, own in parts:
        if memory.below is not None:
            memory.below.hit(own, now)
        wait = max(memory.free_at - now, 0)
        memory.move(own, "read", now)
        done = memory.free_at + memory.rules["latency"]
        memory.counts.update(loaded=len(own), wait_ns=wait, load_ns=done - now)
        ready = max(ready, done)
    return ready


def finish(parts):
    """Give back the blocks of `parts`, which were loaded, the last one first."""
    for memory, own in parts:
        memory.kept.clear()
        for block in reversed(own):
            memory.touch(block)
            if memory.rules["keep"] == "exclusive":
                memory.counts["moved"] += 1
                memory.remove(block)
