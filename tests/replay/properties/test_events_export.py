"""Exported events leave the same blocks resident in a tracker as a replay of the trace."""

import pytest
from helpers.traces import ask, compact, drop_blocks, record, serve, serve_tiers, write
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache, OutOfBlocks, Request, Trace, TraceError, api, read_events
from kvcore.request import block_keys
from kvcore_events.block_tracker import BlockTracker, check_recording
from kvcore_events.formats import decode, encode
from kvcore_events.model import BlockRemoved
from kvcore_events.recording import RecordingWriter
from kvcore_plugins.eviction import FIFO, LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.export import block_hash, dynamo_batches, event_batches
from kvcore_replay.state.cache import CacheState

ROWS = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=6), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


def cached(path):
    """Return the hashes that are cached at the end of a replayed trace, and their number."""
    lines = iter(read_events(path))
    header = next(lines)
    state = CacheState(header)
    for line in lines:
        state.apply(line)
    ratio = max(1, header.key_tokens // header.block_size)
    return {
        block_hash(span.keys[index // ratio], index % ratio, ratio)
        for span in state.spans.values()
        for index in range(span.start, span.end)
    }, state.cached


def followed(batches):
    """Return a tracker that has applied all batches, each encoded and decoded."""
    tracker = BlockTracker()
    for index, batch in enumerate(batches):
        again = decode(encode(batch))
        assert again == batch
        tracker.apply(again, index)
    return tracker


def run(path, rows, blocks, block_size, policy):
    """Record a cache that serves `rows`: prompts, whether they close at once, time."""
    with Trace(path) as trace:
        cache = KVCache(
            blocks, block_size, eviction=policy(), prefix=Radix(), trace=trace, key_tokens=4
        )
        now, left = 0, []
        for serial, (text, closes, passed) in enumerate(rows):
            now += passed
            request = ask(serial, text)
            try:
                seq = cache.open(request, None, now)
            except OutOfBlocks:
                continue
            cache.commit(seq, request.prompt_tokens - seq.hit_blocks * block_size, now)
            if closes:
                cache.close(seq, now)
            else:
                left.append(seq)
        for seq in left:
            cache.close(seq, now)
    return path


@given(
    rows=ROWS,
    blocks=st.integers(6, 16),
    block_size=st.sampled_from([2, 4]),
    policy=st.sampled_from([LRU, FIFO]),
)
def test_the_tracker_agrees_with_the_replay(tmp_path_factory, rows, blocks, block_size, policy):
    """The tracker ends with the blocks of the replay, each once, and without anomalies."""
    path = run(tmp_path_factory.mktemp("t") / "t.jsonl", rows, blocks, block_size, policy)
    hashes, count = cached(path)
    for batches in (event_batches(path), dynamo_batches(path)):
        tracker = followed(batches)
        [resident] = [*tracker.resident().values()] or [{}]
        assert resident == dict.fromkeys(hashes, 1)
        assert len(resident) == count == tracker.stored - tracker.removed
        assert not any(tracker.anomalies.values())


@given(rows=ROWS, blocks=st.integers(6, 16), block_size=st.sampled_from([2, 4]))
def test_a_block_is_removed_after_its_children(tmp_path_factory, rows, blocks, block_size):
    """A block is removed only after all its children."""
    path = run(tmp_path_factory.mktemp("t") / "t.jsonl", rows, blocks, block_size, LRU)
    parents = {}
    for batch in event_batches(path):
        for event in batch.events:
            for block in getattr(event, "blocks", tuple)():
                parents[block.hash] = block.parent
            for gone in event.hashes if isinstance(event, BlockRemoved) else ():
                del parents[gone]
                assert gone not in parents.values()


@pytest.mark.parametrize("make", [record, serve, drop_blocks, compact])
def test_every_kind_of_line_is_exported(tmp_path, make):
    """The tracker ends with the blocks of the replay for traces with every kind of line.

    These have forks, duplicates, preemptions and retention.
    """
    path = make(tmp_path / "t.jsonl")
    hashes, _ = cached(path)
    [resident] = followed(event_batches(path)).resident().values()
    assert resident == dict.fromkeys(hashes, 1)


def test_the_parent_of_a_stored_block_is_stored(tmp_path):
    """A block has the one before it as parent where a prompt ends within a key, too."""
    path, known = tmp_path / "t.jsonl", {None}
    requests = [
        Request(id=n, prompt_tokens=90, output_tokens=40, keys=[n, 100 + n], key_tokens=64)
        for n in range(3)
    ]
    api.simulate(requests, blocks=60, like="vllm", trace=path)
    for batch in event_batches(path):
        for event in batch.events:
            assert event.parent in known
            known.update(event.hashes)
    assert len(known) == 1 + sum(8 for _ in requests)


def test_tiers_are_exported_as_mediums(tmp_path):
    """The tracker ends with the blocks of the replay in the pool and in each tier."""
    path = serve_tiers(tmp_path / "t.jsonl")
    hashes, _ = cached(path)
    header, *lines = read_events(path)
    state = CacheState(header)
    for line in lines:
        state.apply(line)
    below = [tier.used - tier.parked_blocks for tier in state.tiers.levels.values()]
    for batches, names in (
        (event_batches(path), ("GPU", "CPU", "DISK")),
        (dynamo_batches(path), ("device", "host_pinned", "disk")),
    ):
        tracker = followed(batches)
        resident = {where.medium: blocks for where, blocks in tracker.resident().items()}
        assert resident[names[0]] == dict.fromkeys(hashes, 1)
        assert [len(resident[name]) for name in names[1:]] == below
        assert not any(tracker.anomalies.values())


def test_digests_are_hashes_of_64_bits(tmp_path):
    """A key that is a digest is exported as its last 64 bits, as vLLM does."""
    keys = block_keys(list(range(8)), 4)
    with Trace(tmp_path / "t.jsonl") as trace:
        cache = KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        seq = cache.open(Request(id=0, prompt_tokens=8, keys=keys, key_tokens=4), None, 0)
        cache.commit(seq, 8, 2_500_000_000)
        cache.close(seq, 3_000_000_000)
    [batch] = event_batches(tmp_path / "t.jsonl")
    [event] = batch.events
    assert event.hashes == tuple(int.from_bytes(key[-8:], "big") for key in keys)
    assert (batch.ts, event.block_size, len(event.tokens)) == (2.5, 4, 8)


def test_equal_blocks_have_equal_exported_tokens(tmp_path):
    """The exported tokens of a block depend on its hash only, and differ between hashes."""
    path = record(tmp_path / "t.jsonl")
    tokens = {}
    for batch in event_batches(path):
        for event in batch.events:
            for block in getattr(event, "blocks", tuple)():
                assert tokens.setdefault(block.hash, block.content) == block.content
    assert len(set(tokens.values())) == len(tokens) > 1


def test_exported_batches_make_a_recording(tmp_path):
    """A recording of exported batches is complete and has no anomaly."""
    from helpers.kv_events import record as write  # noqa: PLC0415 - two files have a `record`

    trace = record(tmp_path / "t.jsonl")
    report = check_recording(write(tmp_path / "r.jsonl", *event_batches(trace)))
    assert report.complete
    assert not any(report.anomalies.values())
    assert report.resident == {"GPU": cached(trace)[1]}


def test_a_long_prompt_is_split_into_several_events(tmp_path):
    """A prompt of 1.2 M tokens is split into events that readers accept."""
    with Trace(tmp_path / "run.jsonl") as trace:
        cache = KVCache(75_000, 16, trace=trace)
        tokens = 1_200_000
        keys = list(range(tokens // 512))
        seq = cache.open(Request(id=1, prompt_tokens=tokens, keys=keys, key_tokens=512), now=0)
        cache.commit(seq, tokens, now=1)
        cache.close(seq)
    with RecordingWriter(tmp_path / "events.jsonl") as recording:
        for index, batch in enumerate(event_batches(tmp_path / "run.jsonl")):
            recording.batch(batch, seq=index)
    report = check_recording(tmp_path / "events.jsonl")
    assert report.resident == {"GPU": len(keys) * 32}
    assert not any(report.anomalies.values())


def test_blocks_too_large_for_an_event_are_refused(tmp_path):
    """A block size that is too large for an event raises TraceError."""
    path = write(tmp_path / "run.jsonl", block_size=2**40, key_tokens=2**40)
    with pytest.raises(TraceError, match="no room for their token ids"):
        list(event_batches(path))
