"""Random servers with cache groups, and their traces."""

from random import Random

from kvcore import Request, Trace
from kvcore.config.values import as_checkpoint
from kvcore.request import Hints
from kvcore.serving import Batching, simulate
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_tiers.grouped import GroupTiers

FULL, STATE, WINDOW = LayerGroup("full", 8), LayerGroup("state", 8), LayerGroup("window", 8, 30)

GROUPS = {
    "window": [FULL, WINDOW],
    "windows": [WINDOW, LayerGroup("window", 8, 11), FULL, WINDOW],
    "windows alone": [WINDOW, LayerGroup("window", 8, 50)],
    "state": [FULL, STATE, STATE],
    "three": [FULL, WINDOW, STATE],
    "two sizes": [
        LayerGroup("full", 16, block_bytes=1 << 20),
        LayerGroup("window", 8, 20, block_bytes=700_001),
    ],
}

SLOT = 1 << 20
"""Bytes of a block, and of a slot of a tier."""

TIERS = [
    [f"host:memory={60 * SLOT},load=always"],
    [f"host:memory={500 * SLOT},write=through,load=always"],
    [f"host:memory={80 * SLOT},keep=exclusive", f"disk:memory={300 * SLOT},load=always"],
    [f"host:memory={40 * SLOT},write=2,load=always,max_wait=0.001"],
    [f"host:memory={30 * SLOT},write=through", f"disk:memory={900 * SLOT},write=1"],
    [f"host:memory={200 * SLOT},load=never", f"disk:memory={300 * SLOT},write=through"],
    [f"host:memory={20 * SLOT},write=through,max_wait=0", f"disk:memory={2 * SLOT}"],
    [f"host:memory={3 * SLOT},max_wait=0.001", f"disk:memory={9 * SLOT}"],
]
"""Tiers of random servers, by number."""

RULES = [None, "vllm:lag=0", "vllm", "sglang"]


def keyed_request(rng, number, arrival, keys, outputs, generating):
    """Return a request for the blocks of `keys`, some without the last or with a limited share.

    `outputs` are lengths to draw from, and `generating` the chance of keys for the output.
    """
    prompt, output = max(1, len(keys) * 8 - rng.randrange(8)), rng.choice(outputs)
    generated = (prompt + output) // 8 - prompt // 8 if rng.random() < generating else 0
    if rng.random() < 0.1 and not generated:
        keys = keys[: rng.randint(0, 9)]
    share = rng.choice((None, None, None, None, 16, 0)) if not generated else None
    return Request(
        id=number,
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        keys=keys,
        hints=Hints() if share is None else Hints(share=share),
        output_keys=[5_000 + number * 100 + index for index in range(generated)],
        key_tokens=8,
    )


def requests(rng, count=40):
    """Return requests whose prompts continue each other, some with keys for their output."""
    made, known, now = [], [], 0
    for number in range(count):
        now += rng.randrange(30_000_000)
        keys = [number * 100 + index for index in range(rng.randint(1, 20))]
        if known and rng.random() < 0.6:
            earlier = rng.choice(known)
            keys = earlier[: rng.randint(1, len(earlier))] + keys[:6]
        known.append(keys)
        made.append(keyed_request(rng, number, now, keys, (1, 5, 40, 80), generating=0.3))
    return made


def grouped_run(seed, path=None, blocks=90, tiers=(), **options):
    """Serve random requests with random groups and rules; return the result and the cache.

    With a `path` the run writes a trace there. `tiers` are below the pool.
    """
    rng = Random(seed)
    groups = GROUPS[rng.choice(list(GROUPS))]
    rules = rng.choice(RULES)
    interval = rng.choice((0, 0, 32, None))
    served = requests(rng, **options)

    def serve(trace):
        cache = GroupedCache(
            groups, blocks, checkpoint=as_checkpoint(interval), key_tokens=8, trace=trace
        )
        if tiers:
            GroupTiers(cache, tiers, SLOT)
        batching = Batching(rules=rules, max_tokens=64, max_seqs=16)
        return simulate(served, cache=cache, batching=batching), cache

    if path is None:
        return serve(None)
    with Trace(path) as trace:
        return serve(trace)
