"""Damaged, forged and cut traces: damage is detected, and what precedes a cut is read."""

import itertools
import random

import orjson
import pytest
from helpers.recorded_runs import is_detected
from helpers.traces import compact, drop_blocks, lines, record, seal, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore import InputError, KVCache, OutOfBlocks, Request, Trace, read_events
from kvcore_plugins.eviction import FIFO, LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.check.trace import check_trace

LINES = 49


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the bytes of a recorded trace."""
    return record(tmp_path_factory.mktemp("recorded") / "trace.jsonl").read_bytes()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Return the path for damaged copies."""
    return tmp_path_factory.mktemp("damaged") / "trace.jsonl"


def as_json(event):
    """Return an event as the JSON of its line."""
    return orjson.loads(orjson.dumps(event.as_dict()))


@given(at=st.integers(0), byte=st.integers(0, 255))
@settings(max_examples=150)
def test_any_changed_byte_is_detected(recorded, damaged, at, byte):
    """A replay detects any changed byte."""
    at %= len(recorded)
    changed = bytearray(recorded)
    changed[at] = byte if byte != changed[at] else byte ^ 1
    damaged.write_bytes(changed)
    assert is_detected(damaged)


@pytest.mark.parametrize("times", [0, 2], ids=["deleted", "repeated"])
def test_any_line_that_is_there_too_seldom_or_too_often_is_detected(recorded, damaged, times):
    """A replay detects any deleted and any repeated line."""
    text = recorded.splitlines(keepends=True)
    for n, line in enumerate(text):
        damaged.write_bytes(b"".join([*text[:n], *[line] * times, *text[n + 1 :]]))
        assert is_detected(damaged), n


@given(pair=st.tuples(st.integers(0, LINES - 1), st.integers(0, LINES - 1)))
def test_any_swapped_lines_are_detected(recorded, damaged, pair):
    """A replay detects any two swapped lines."""
    here, there = pair
    text = recorded.splitlines(keepends=True)
    text[here], text[there] = text[there], text[here]
    damaged.write_bytes(b"".join(text))
    assert is_detected(damaged) is (here != there)


def test_a_removed_line_is_detected_behind_a_right_digest(recorded, damaged):
    """A removed line is detected even if numbers, counts and digest are made right.

    The exception is a FREE at close, if no later line depends on its blocks and pins.
    """
    damaged.write_bytes(recorded)
    events = lines(damaged)
    silent = []
    for n in range(1, LINES - 1):
        seal(damaged, events[:n] + events[n + 1 :])
        if not is_detected(damaged):
            silent.append(events[n])
    assert all(line["event"] == "FREE" and line["reason"] == "close" for line in silent)


def test_a_repeated_line_is_detected_behind_a_right_digest(recorded, damaged):
    """A repeated line is detected even if numbers, counts and digest are made right."""
    damaged.write_bytes(recorded)
    events = lines(damaged)
    for n in range(1, LINES - 1):
        seal(damaged, events[: n + 1] + events[n:])
        assert is_detected(damaged), events[n]


@pytest.mark.parametrize("record", [serve, compact])
def test_a_forged_line_of_a_timed_trace_is_detected(damaged, record):
    """Under a clock any removed or repeated line is detected, since every request must end."""
    events = lines(record(damaged))
    for n in range(1, len(events) - 1):
        seal(damaged, events[:n] + events[n + 1 :])
        assert is_detected(damaged), events[n]
        seal(damaged, events[: n + 1] + events[n:])
        assert is_detected(damaged), events[n]


def test_a_forged_free_of_dropped_tokens_is_detected(damaged):
    """A changed, removed or repeated FREE of dropped tokens is detected.

    All dropped tokens are in the closing FREE of the sequence again, even those that were only
    hidden and left no mark in the pool. Only the digest proves when they were dropped.
    """
    events = lines(drop_blocks(damaged))
    places = [n for n, line in enumerate(events) if line.get("scope") == "sequence"]
    assert {bool(events[n]["runs"]) for n in places} == {True, False}
    for n in places:
        line, before, after = events[n], events[:n], events[n + 1 :]
        numbers = itertools.product(("seq", "first", "blocks"), (-1, 1))
        changes = [{name: line[name] + by} for name, by in numbers]
        changes += [{"runs": [[0, 1]]}, {"runs": [*line["runs"], [9, 1]]}, {"by": "lru"}]
        for change in changes:
            assert is_detected(seal(damaged, [*before, line | change, *after])), change
        assert is_detected(seal(damaged, before + after)), line
        assert is_detected(seal(damaged, [*before, line, line, *after])), line


def test_a_forged_compaction_is_detected(damaged):
    """A changed number of a COMPACT line is detected, even if two of them change together."""
    events = lines(compact(damaged))
    places = [n for n, line in enumerate(events) if line["event"] == "COMPACT"]
    for n in places:
        line, before, after = events[n], events[:n], events[n + 1 :]
        names = ("seq", "tokens", "held", "ahead")
        changes = [{name: line.get(name, 0) + by} for name in names for by in (-1, 1)]
        changes += [{a: line.get(a, 0) + by, b: line.get(b, 0) + by}
                    for a, b in itertools.combinations(names, 2) for by in (-1, 1)]  # fmt: skip
        for field in ("runs", "new"):
            changes += [{field: []}, {field: [[0, 1]]}, {field: [*line.get(field, []), [8, 1]]}]
        for change in changes:
            forged = line | change
            if {"new": [], "ahead": 0} | forged != {"new": [], "ahead": 0} | line:
                assert is_detected(seal(damaged, [*before, forged, *after])), (n, change)


@given(n=st.integers(1, LINES - 2), data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
def test_forged_block_ids_are_detected(recorded, damaged, n, data):
    """Changed block ids in a line are detected even if the digest is made right."""
    damaged.write_bytes(recorded)
    events = lines(damaged)
    runs = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(-4, 4)), max_size=3))
    if "runs" not in events[n] or events[n]["runs"] == [list(run) for run in runs]:
        return
    events[n]["runs"] = runs
    assert is_detected(seal(damaged, events))


def test_a_file_cut_at_any_byte_yields_every_event_before_the_cut(recorded, damaged):
    """A cut file yields all events before the cut and a reason, and raises nothing.

    It is cut beside the ends of all lines, and at every byte of the first two and the last two.
    """
    damaged.write_bytes(recorded)
    events = lines(damaged)
    ends = list(itertools.accumulate(map(len, recorded.splitlines(keepends=True))))
    beside = {end + by for end in ends for by in (-2, -1, 0, 1)}
    for size in sorted({*range(ends[1]), *beside, *range(ends[-3], ends[-1])}):
        if size >= len(recorded):
            break
        damaged.write_bytes(recorded[:size])
        reader = read_events(damaged)
        # A line is whole with its closing brace: only its newline may be missing.
        whole = sum(end - 1 <= size for end in ends)
        assert [as_json(event) for event in reader] == events[:whole]
        assert not reader.complete
        assert reader.cut_reason


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_at_any_byte_yields_its_beginning(tmp_path, suffix):
    """A cut compressed file yields its first events, and a longer piece never fewer.

    The reader never raises, and never reports the file as complete.
    """
    path = record(tmp_path / f"trace.jsonl{suffix}")
    whole, events, before = path.read_bytes(), lines(path), 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        reader = read_events(path)
        read = list(map(as_json, reader))
        assert read == events[: len(read)]
        assert before <= len(read)
        assert not reader.complete
        assert reader.cut_reason
        before = len(read)


def prompts(rng, key_tokens):
    """Yield requests for prompts of a small tree, some with a partial last block."""
    keys = {}
    for serial in itertools.count():
        path, chain = (), []
        for _ in range(rng.randint(1, 5)):
            path = (*path, rng.choice("aab"))
            chain.append(keys.setdefault(path, len(keys)))
        prompt = len(chain) * key_tokens - rng.randrange(key_tokens)
        yield Request(id=serial, prompt_tokens=prompt, keys=chain, key_tokens=key_tokens)


def step(rng, cache, requests, sequences, now):
    """Perform one random action on `cache`."""
    actions = ["open", "open", "extend", "commit", "commit", "fork", "rollback", "close"]
    actions.append("compact")
    action = rng.choice(actions)
    if action == "open" or not sequences:
        first = rng.choice([None, None, rng.randrange(9)])
        sequences.append(cache.open(next(requests), first, now))
    elif action == "close":
        cache.close(sequences.pop(rng.randrange(len(sequences))), now)
    else:
        seq = rng.choice(sequences)
        if action == "extend":
            cache.extend(seq, rng.randrange(9), now)
        elif action == "commit":
            cache.commit(seq, rng.randrange(seq.tokens - seq.computed + 1), now)
        elif action == "rollback":
            cache.rollback(seq, rng.randrange(9), now)
        elif action == "compact":
            cache.compact(seq, rng.randrange(1, 9), now)
        else:
            sequences.append(cache.fork(seq, now))


@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from([2, 6, 20]),
    geometry=st.sampled_from(
        [("keys", 4, 4), ("keys", 2, 6), ("tokens", 4, 4), ("tokens", 2, 6), ("tokens", 8, 4)]
    ),
    policy=st.sampled_from([LRU, FIFO]),
)
def test_random_runs_replay_without_errors(damaged, seed, blocks, geometry, policy):
    """The trace of random actions replays to the state and the hits of the cache."""
    rng = random.Random(seed)
    count, size, key_tokens = geometry
    with Trace(damaged, seed=seed) as trace:
        cache = KVCache(
            blocks,
            size,
            eviction=policy(),
            prefix=Radix(),
            accounting=count,
            key_tokens=key_tokens,
            trace=trace,
        )
        requests, sequences = prompts(rng, key_tokens), []
        for now in range(60):
            try:
                step(rng, cache, requests, sequences, now)
            except (OutOfBlocks, InputError):
                continue
    report = check_trace(damaged)
    assert report.pool["free"] == cache.pool.free_blocks
    assert report.pool["cached"] == cache.tree.cached_blocks
    assert report.pool["spans"] == len(list(cache.tree.spans()))
    assert report.hit["hit_blocks"] == cache.stats.hit_blocks
    assert report.hit["ratio"]["request"] == cache.stats.ratios()["request"]
