"""Traces for tests: written by hand or recorded from a cache, read, and sealed again.

A prompt is a text, one letter a block of 4 tokens, as in `caches`; its keys are ints, since a
trace holds no others.
"""

from hashlib import blake2b

import orjson
from helpers.requests import prefixes
from helpers.serving import Even

import kvcore
from kvcore import KVCache, Request, Trace, read_events
from kvcore.serving import Batching, simulate
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

BLOCK = 4

CACHE = {
    "count": "tokens",
    "block_size": BLOCK,
    "key_tokens": BLOCK,
    "blocks": 8,
    "plugins": {
        "eviction": {"name": "lru", "options": {}},
        "prefix": {"name": "radix", "options": {}},
    },
}


def key(text):
    """Return the chained key of the block in which `text`, of up to 7 letters, ends."""
    return int.from_bytes(text.encode(), "big")


def ask(name, text, tokens=None, **fields):
    """Return a request called `name` for `text`, with full blocks unless `tokens` is given."""
    return Request(
        id=name,
        prompt_tokens=len(text) * BLOCK if tokens is None else tokens,
        keys=prefixes(text, key),
        key_tokens=BLOCK,
        **fields,
    )


def write(path, *events, **cache):
    """Write a trace of `events`, one per ns: a request, or the name and fields of a line."""
    with Trace(path) as trace:
        trace.begin(**CACHE | cache)
        for now, event in enumerate(events):
            if isinstance(event, Request):
                trace.request(event, now)
            else:
                trace.write({"n": 0, "t": now, "event": event[0], **event[1]})
    return path


def record(path, blocks=8):
    """Record a small run of a real cache with every event that successful calls can cause."""
    with Trace(path) as trace:
        cache = KVCache(blocks, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        drive(cache)
    return path


def drive(cache):
    """Drive `cache` through all of its methods, with one nanosecond per step."""
    first = cache.open(ask("first", "abc", 13), 5, 1)
    cache.commit(first, 4, 2)
    cache.extend(first, 8, 3)
    cache.commit(first, 8, 4)
    same = cache.open(ask("same", "abd", 12), None, 5)
    twin = cache.open(ask("twin", "abd", 12), None, 6)
    cache.commit(same, 4, 7)
    cache.commit(twin, 4, 8)
    for now, seq in enumerate((first, same, twin), 9):
        cache.close(seq, now)
    parent = cache.open(ask("parent", "ax", 9), None, 12)
    child = cache.fork(parent, 13)
    cache.commit(parent, 4, 14)
    cache.extend(child, 2, 15)
    cache.rollback(child, 3, 16)
    cache.close(parent, 17)
    cache.close(child, 18)
    last = cache.open(ask("last", "qrstuv", 25), None, 19)
    cache.commit(last, 24, 20)
    cache.close(last, 21)
    again = cache.open(ask("first", "abc", 13), None, 22, resumed=True)
    cache.close(again, 23)


def drop_blocks(path):
    """Record sequences that drop blocks by a window: shared ones, own ones, after a fork."""
    with Trace(path) as trace:
        cache = KVCache(
            11, BLOCK, eviction=LRU(), prefix=Radix(), retention="window:tokens=5", trace=trace
        )
        first = cache.open(ask("first", "abcd", 18), 10, 1)
        cache.commit(first, 10, 2)
        cache.extend(first, 8, 3)
        cache.commit(first, 8, 4)
        child = cache.fork(first, 5)
        for now, seq in enumerate((child, first), 6):
            cache.extend(seq, 9, now)
            cache.commit(seq, 9, now)
        cache.close(first, 8)
        cache.extend(child, 1, 9)
        cache.commit(child, 1, 9)
        cache.close(child, 10)
        cache.close(cache.open(ask("last", "qrstuv"), None, 11), 12)
    return path


def serve(path):
    """Record all events of a server with a clock, for a few requests."""
    with Trace(path, mode="model") as trace:
        cache = KVCache(8, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        long, short = ask("long", "abc", output_tokens=6), ask("short", "abx", output_tokens=1)
        for request in (long, ask("huge", "h", 36)):
            trace.request(request, 0)
        trace.reject(0, request="huge", why="needs 9 blocks, the pool has 8")
        seq = cache.open(long, None, 0)
        cache.commit(seq, 12, 1)
        trace.first_token(1, request="long", seq=1)
        trace.request(short, 1)
        trace.preempt(1, request="long", seq=1, how="pause", requester="short")
        quick = cache.open(short, None, 1)
        cache.commit(quick, 4, 2)
        trace.first_token(2, request="short", seq=2)
        trace.finish(2, request="short", seq=2, output=1)
        cache.close(quick, 2)
        trace.resume(2, request="long", seq=1)
        cache.extend(seq, 2, 2)
        trace.preempt(4, request="long", seq=1, how="recompute")
        cache.close(seq, 4)
        silent = cache.open(ask("silent", "y"), None, 4)
        cache.commit(silent, 4, 5)
        trace.finish(5, request="silent", seq=3, output=0)
        cache.close(silent, 5)
        seq = cache.open(long, None, 5, resumed=True, target=15)
        cache.extend(seq, 2, 5)
        cache.commit(seq, 5, 6)
        trace.finish(9, request="long", seq=4, output=6)
        cache.close(seq, 9)
    return path


def compact(path):
    """Record two requests with a clock that are compacted within and after their prompts."""
    with Trace(path, mode="model") as trace:
        cache = KVCache(
            9, BLOCK, eviction=LRU(), prefix=Radix(), retention="window:tokens=99", trace=trace
        )
        old = cache.open(ask("old", "xy"), None, 0)
        cache.commit(old, 8, 1)
        trace.finish(1, request="old", seq=1, output=0)
        cache.close(old, 1)
        long = cache.open(ask("long", "abc", 14, output_tokens=8), None, 1)
        cache.commit(long, 9, 2)
        cache.compact(long, 5, 2)
        wide = cache.open(ask("wide", "kl", output_tokens=2), None, 2)
        cache.commit(wide, 8, 3)
        cache.compact(wide, 6, 3)
        trace.first_token(3, request="wide", seq=3)
        cache.commit(long, 5, 3)
        cache.compact(long, 3, 3)
        trace.first_token(3, request="long", seq=2)
        cache.extend(wide, 1, 4)
        cache.commit(wide, 1, 4)
        trace.finish(4, request="wide", seq=3, output=2)
        cache.close(wide, 4)
        cache.extend(long, 5, 5)
        cache.commit(long, 5, 6)
        cache.compact(long, 4, 6)
        cache.extend(long, 2, 7)
        cache.commit(long, 2, 8)
        trace.finish(8, request="long", seq=2, output=8)
        cache.close(long, 8)
    return path


TIERS = (
    (
        "host:memory=6000,keep=exclusive,load=always,read_bandwidth=1TB,write_bandwidth=1TB,"
        "latency=5e-9"
    ),
    "disk:memory=9000,load=always,read_bandwidth=500GB,write_bandwidth=250GB,latency=2e-8",
)
"""A tier of 6 slots and one of 9, of 1000 bytes: 1 ns a block; 2 to read and 4 to write."""


def serve_tiers(path, tiers=TIERS, requests=None, blocks=8, mode="model"):
    """Record a server whose blocks move to two tiers and back, and are swapped."""
    if requests is None:
        requests = [
            ask("a", "abcd", output_tokens=1, arrival=0),
            ask("b", "efghi", output_tokens=1, arrival=100),
            ask("c", "", 16, output_tokens=1, arrival=200),
            ask("again", "abcdx", output_tokens=1, arrival=300),
            ask("p", "pq", output_tokens=12, arrival=500),
            ask("r", "rstu", output_tokens=12, arrival=500),
        ]
    with Trace(path, mode=mode, executor="simulate") as trace:
        cache = KVCache(blocks, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        if tiers:
            kvcore.Tiers(cache, tiers, 1000)
        simulate(requests, cache=cache, latency=Even(), batching=Batching(watermark=0.0))
    return path


def lines(path):
    """Return the lines of a trace as dicts."""
    events = (event.as_dict() for event in read_events(path))
    return [orjson.loads(orjson.dumps(event)) for event in events]


def schema_1(path):
    """Return the bytes of a trace in schema 1, which has a line for each block that grows."""
    events = [event.as_dict() for event in read_events(path)]
    events[0]["schema"] = 1
    *body, end = [orjson.dumps(event) + b"\n" for event in events]
    data = b"".join(body)
    if events[-1]["event"] != "END":
        return data + end
    digest = blake2b(data, digest_size=16).hexdigest()
    return data + orjson.dumps(events[-1] | {"digest": digest}) + b"\n"


def seal(path, events):
    """Write `events` as a trace with correct numbers, counts and digest."""
    body = [dict(event, n=n) for n, event in enumerate(events) if event["event"] != "END"]
    data = b"".join(orjson.dumps(event) + b"\n" for event in body)
    counts = {}
    for event in body:
        counts[event["event"]] = counts.get(event["event"], 0) + 1
    end = {"n": len(body), "t": body[-1]["t"], "event": "END", "lines": len(body)}
    digest = blake2b(data, digest_size=16).hexdigest()
    end |= {"events": counts, "digest": digest}
    path.write_bytes(data + orjson.dumps(end) + b"\n")
    return path
