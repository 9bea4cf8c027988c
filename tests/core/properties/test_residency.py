"""Residency statistics of a cache against those rebuilt from its trace."""

from __future__ import annotations

import tempfile
from collections import OrderedDict, deque
from io import BytesIO
from pathlib import Path

import hypothesis.strategies as st
from helpers.policies import POLICIES, build
from helpers.schedulers import SCHEDULERS
from helpers.serving import servers
from hypothesis import given

from kvcore import KVCache, Trace
from kvcore.cache import Residency
from kvcore.cache.residency import Refaults
from kvcore.testing import Traffic
from kvcore.testing.harness import request_lists
from kvcore_replay.state.residency import rebuild_residency as residency
from kvcore_replay.untimed import replay, served


def of_trace(content):
    """Return the residency statistics rebuilt from the bytes of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        file.write_bytes(content)
        return residency(file).as_dict()


@given(server=servers(), scheduler=st.sampled_from(SCHEDULERS))
def test_a_trace_gives_the_residency_of_a_timed_run(server, scheduler):
    """A trace gives the residency of a run with preemption, growth, hints and expiry."""
    run = server.run(scheduler)
    assert run.result.cache.tree.residency.as_dict() == of_trace(run.trace)


@given(
    requests=request_lists(Traffic(key_tokens=4)),
    policy=st.sampled_from(sorted(POLICIES)),
    blocks=st.integers(1, 40),
    layout=st.sampled_from([("keys", 4), ("keys", 1), ("tokens", 4), ("tokens", 2)]),
)
def test_a_trace_gives_the_residency_of_a_replay(requests, policy, blocks, layout):
    """A trace gives the residency of a replay, for any policy, accounting and key size."""
    count, size = layout
    out = BytesIO()
    with Trace(out) as trace:
        cache = KVCache(
            blocks, size, eviction=build(policy), accounting=count, key_tokens=4, trace=trace
        )
        cache.tree.residency = Residency(blocks)
        replay(requests, cache)
    assert cache.tree.residency.as_dict() == of_trace(out.getvalue())


@given(
    requests=request_lists(Traffic(key_tokens=4)),
    blocks=st.integers(1, 20),
    window=st.integers(0, 60),
    size=st.sampled_from([4, 1]),
)
def test_refaults_equal_a_count_by_block(requests, blocks, window, size):
    """Restored blocks are those stored again within `window` evictions, by block."""
    cache = KVCache(blocks, size, eviction=build("lru"), accounting="keys", key_tokens=4)
    cache.tree.residency = seen = Watching(blocks)
    seen.refaults, seen.expected = Refaults(window), ByBlock(window, 4 // size)
    replay(requests, cache)
    assert seen.restored_blocks == seen.expected.blocks


@given(
    requests=request_lists(Traffic(key_tokens=4)),
    blocks=st.integers(1, 40),
    size=st.sampled_from([1, 2, 4]),
)
def test_events_in_batches_count_as_single_events(requests, blocks, size):
    """Residency is the same whether events are counted in batches or one by one."""

    def seen(kind):
        cache = KVCache(blocks, size, eviction=build("lru"), accounting="keys", key_tokens=4)
        cache.tree.residency = residency = kind(blocks)
        deque(served(requests, cache), maxlen=0)  # in Python: the core in C has no batches
        return residency

    batched, single = seen(Residency), seen(Immediate)
    assert not any((single._ages, single._stored, single._gone, single._expired))
    assert batched._stored or not single.stored_blocks
    assert batched.as_dict() == single.as_dict()


class Immediate(Residency):
    """Residency statistics that count every event at once."""

    def on_hit(self, span, now):
        """Count a hit at once."""
        super().on_hit(span, now)
        self.settle()

    def on_store(self, span, blocks):
        """Count a stored run at once."""
        super().on_store(span, blocks)
        self.settle()

    def on_evict(self, span, blocks, now, reason):
        """Count an evicted run at once."""
        super().on_evict(span, blocks, now, reason)
        self.settle()


class Watching(Residency):
    """Residency statistics that pass their events on to the reference."""

    def on_store(self, span, blocks):
        """Pass the stored blocks on."""
        super().on_store(span, blocks)
        self.expected.stored(span.path_keys, span.end - blocks, span.end)

    def on_evict(self, span, blocks, now, reason):
        """Pass the evicted blocks on."""
        super().on_evict(span, blocks, now, reason)
        self.expected.evicted(span.path_keys, span.end - blocks, span.end)


class ByBlock:
    """A reference that counts restored blocks one by one."""

    def __init__(self, window, ratio):
        """Start without evicted blocks."""
        self.window, self.ratio = window, ratio
        self.blocks = self.clock = 0
        self.gone = OrderedDict()

    def evicted(self, keys, start, end):
        """Note the time at which each block was evicted."""
        for place in reversed(range(start, end)):
            self.clock += 1
            self.gone[keys[place // self.ratio], place % self.ratio] = self.clock

    def stored(self, keys, start, end):
        """Count the blocks that were evicted within the window."""
        for index in range(start, end):
            left = self.gone.pop((keys[index // self.ratio], index % self.ratio), None)
            self.blocks += left is not None and self.clock - left <= self.window
