"""Random servers with a pool for each kind of layer, and their traces."""

from random import Random

import attrs
from helpers.grouped_traces import keyed_request

from kvcore import Trace
from kvcore.request import Hints
from kvcore.serving import Batching, simulate
from kvcore_plugins.layer_pools import PooledCache

KINDS = ("window", "state", "both")

RULES = ["sglang", "sglang:new_token_ratio=none,preempts=last", "sglang:lag=1"]


def requests(rng, count):
    """Return requests that continue, repeat or leave each other's prompts."""
    made, known, now = [], [], 0
    for number in range(count):
        now += rng.randrange(30_000_000)
        keys = [number * 100 + index for index in range(rng.randint(1, 40))]
        if known and rng.random() < 0.7:
            earlier = rng.choice(known[-8:])
            keys = earlier[: rng.randint(1, len(earlier))] + keys[: rng.randint(0, 12)]
        known.append(keys)
        made.append(keyed_request(rng, number, now, keys, (1, 5, 40, 150), generating=0.2))
    return made


def pooled_run(
    seed, path=None, count=40, eviction="lru:renew_split=true", *, jumps=True, pins=False
):
    """Serve random requests with random pools and rules; return the result and the cache.

    With a `path` the run writes a trace there; with `pins` clients pin some of the prompts.
    """
    rng = Random(seed)
    kind, size = KINDS[seed % 3], rng.choice((1, 4, 8))
    sizes, chunk = {}, rng.choice((64, 128, 256))
    if kind != "state":
        window = rng.choice((2, 17, 100))
        least = 2 * -(-(window - 1) // size) + 128 // size + 2
        slots = least + (chunk + rng.choice((0, 100, 400))) // size
        sizes = {"window": window, "window_slots": slots}
    if kind != "window":
        sizes["state_slots"] = rng.choice((5, 10, 20))
    served, blocks = requests(rng, count), rng.choice((700, 900, 1800)) // size
    rules = rng.choice(RULES)
    if pins:
        pinned = [attrs.evolve(request, hints=Hints(pin=10**8)) for request in served[::4]]
        served[::4] = pinned

    def serve(trace):
        cache = PooledCache(
            blocks, size, prefix="radix:evict=leaf", key_tokens=8, eviction=eviction,
            trace=trace, **sizes,
        )  # fmt: skip
        batching = Batching(rules=rules, max_tokens=chunk, max_seqs=16)
        return simulate(served, cache=cache, batching=batching, jumps=jumps), cache

    if path is None:
        return serve(None)
    with Trace(path) as trace:
        return serve(trace)
