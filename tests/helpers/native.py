"""Random servers of plain runs, and all that a run of one leaves: to compare the two cores."""

import os
import random
from contextlib import contextmanager

import pytest
from hypothesis import settings

from kvcore import KVCache, KvcoreError, Request, native
from kvcore.request import SLO, Hints
from kvcore.serving import Batching, simulate
from kvcore.serving import native as serving
from kvcore.serving.rules import Rules

needs_core = pytest.mark.skipif(
    native.library() is None, reason=f"the loop runs {native.state()}"
)

POLICIES = (
    *("lru", "lru:renew_split=true", "fifo", "mru", "slru", "lruk", "lfu", "tinylfu", "arc"),
    *("s3fifo", "sieve", "cost", "random", "hazard"),
)
SCHEDULERS = "fcfs", "fcfs", "fcfs", "sjf", "lpm", "srpt:preemptive=false"
KEY_TOKENS = 512

examples = settings(
    max_examples=int(os.environ.get("KVCORE_NATIVE_EXAMPLES", settings.default.max_examples))
)
"""The number of random servers of a test: that of the profile, unless the variable says one."""


@contextmanager
def core(*, turns=-1, used=True):
    """Run loops by the core in C, for so many turns; or in Python alone."""
    run = serving.run
    patch = pytest.MonkeyPatch()
    patch.setattr(serving, "run", lambda loop: used and run(loop, turns))
    try:
        yield
    finally:
        patch.undo()


def random_requests(chance, count):
    """Return requests that share prefixes; some have names, SLOs, sessions, or are rejected."""
    now, fresh, paths, requests = 0, 0, [[]], []
    named, offline = chance.random() < 0.2, chance.random() < 0.1
    in_sessions = chance.random() < 0.3
    for index in range(count):
        if not offline and chance.random() < 0.9:
            now += int(chance.expovariate(1 / chance.choice((1e6, 2e8, 2e9))))
        path = chance.choice(paths)[: chance.randrange(40)]
        more = chance.randrange(12) or not path
        path = [*path, *(n if n % 20 else f"key {n}" for n in range(fresh, fresh + more))]
        fresh += more
        paths.append(path)
        slo = None
        if chance.random() < 0.1:
            slo = SLO(
                ttft_ns=chance.choice((None, 10**8, 10**9)),
                tpot_ns=chance.choice((None, 10**7, 10**8)),
                deadline_ns=chance.choice((None, 10**9, 10**10)),
            )
        closed = {}
        if in_sessions and index > count // 3:
            name = f"session {index % 4}"
            before = [r.id for r in requests if r.session == name]
            closed = {"session": name, "think_time": chance.choice((0, 10**6, 10**9))}
            closed |= {"after": chance.choice(before)} if before and index % 3 else {}
        empty = chance.random() < 0.02
        tokens = (len(path) - 1) * KEY_TOKENS + chance.randrange(1, KEY_TOKENS + 1)
        requests.append(
            Request(
                id=f"request {index}" if named else index,
                arrival=now,
                prompt_tokens=0 if empty else tokens,
                output_tokens=chance.choice((0, 1, 2, 3, 20, 200, 900)),
                keys=path,
                key_tokens=KEY_TOKENS,
                slo=slo,
                tenant=chance.choice((None, "one", "other")),
                **closed,
            )
        )
    return requests


def random_rules(chance):
    """Return rules of an engine that the core knows, and whether prompts are chunked."""
    chunked = chance.random() < 0.8
    if chance.random() < 0.4:
        return {"rules": Rules(), "chunked": chunked}
    rules = Rules(
        unchunked=chance.choice(("alone", "wait")),
        max_chunk=chance.choice((None, None, 64, 500)) if chunked else None,
        reserve=chance.choice(("prompt", "chunk", "chunk", "first-chunk")),
        commit=chance.choice(("computed", "scheduled")),
        generated=chance.choice(("keyed", "cached")),
        admit_after_preemption=chance.random() < 0.5,
        ties=chance.choice(("last", "first")),
        lag=chance.choice((0, 1)),
    )
    return {"rules": rules, "chunked": chunked}


def random_server(seed, *, hints=False):
    """Return a function that serves a random workload on a random server, as `simulate` does.

    With `hints` a few requests have some, which the loop in Python serves.
    """
    chance = random.Random(seed)
    size = chance.choice((16, 64, 256, 512, 1024))
    requests = random_requests(chance, chance.randrange(5, 200))
    if hints:
        chosen = chance.choice(requests)
        chosen.hints = chance.choice((Hints(share=600), Hints(pin=10**9), Hints(demote=True)))
    need = max(-(-(r.prompt_tokens + r.output_tokens) // size) for r in requests)
    blocks = need + 1 + chance.randrange(1 + int(need * chance.choice((0.2, 0.5, 1, 4, 20))))
    if chance.random() < 0.1:
        blocks = max(1, need // 2)
    options = {
        "scheduler": chance.choice(SCHEDULERS),
        "latency": chance.choice(
            ("roofline", "roofline:engine=vllm", "roofline:frontend=0.02", "linear")
        ),
        "rate_scale": chance.choice((1.0, 1.0, 1.5, 0.3)),
        "residency": chance.random() < 0.7,
        "slo": chance.choice((None, SLO(ttft_ns=10**9))),
        "batching": Batching(
            max_tokens=chance.choice((512, 2048, 8192)),
            max_seqs=chance.choice((4, 32, 256)),
            watermark=chance.choice((0, 0, 0.01, 0.1)),
            steps=chance.choice(("mixed", "mixed", "prefill-first")),
            max_model_len=chance.choice((None, None, 4000)),
            **random_rules(chance),
        ),
    }
    prefix = chance.choice(("radix", "radix", "hashed", "hashed:spans=block", "none"))
    policy = chance.choice(POLICIES)

    def serve():
        cache = KVCache(blocks, size, eviction=policy, key_tokens=KEY_TOKENS, prefix=prefix)
        return simulate(list(requests), cache=cache, **options)

    return serve


def left_by(serve):
    """Return all that a run leaves, in plain values: its error, or records, cache and spans."""
    try:
        result = serve()
    except KvcoreError as error:
        return type(error), str(error)
    log, cache = result.log, result.cache
    cache.check_integrity()
    tree, pool = cache.tree, log.pool
    pool.settle()
    log.itl.settle()
    gaps = log.itl._histogram
    return {
        "columns": {name: list(column) for name, column in log.columns().items()},
        "log": (log.reasons, log.steps, log.busy_ps, log.own_slos),
        "pool": (pool.peak, pool._active_area, pool._cached_area, list(pool._times)),
        "gaps": (gaps.weight, gaps.total, gaps.high, dict(gaps._weights)),
        "residency": cache.residency_by_tier(),
        "stats": repr(cache.stats),
        "cache": (cache.now, cache._last_id, cache._admissions, cache.pool.free_blocks),
        "tree": (tree.evicted_blocks, tree.cached_blocks, tree.unpinned_blocks),
        "serials": (tree._last_id, tree._created, tree._released),
        "spans": sorted(map(_plain, tree.spans())),
    }


def _plain(span):
    """Return the attributes of a span, other spans by their ids."""
    return (
        *(span.id, span.start, span.end, span.ref_count, span.created, span.last_access),
        *(span.created_order, span.last_hit_order, str(span.last_request)),
        *(span.turn, str(span.created_by)),
        *(span.released_order, span.hit_count, span.priority, span.priority_until),
        *(span.expires, span.tenant, span.creator, span.ids, str(span.keys()), span.parent.id),
        sorted(child.id for child in (span.children or {}).values()),
    )
