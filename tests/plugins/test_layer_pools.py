"""Pools for the kinds of layers of a model: hits, tombstones, sizes, and runs with them."""

from __future__ import annotations

from fractions import Fraction
from hashlib import sha256
from random import Random

import pytest
from helpers.pool_streams import CacheSide, Pools, drive
from helpers.pooled_traces import pooled_run
from helpers.requests import keyed

import kvcore
from kvcore import InputError, OutOfBlocks, Request
from kvcore.config import RunConfig
from kvcore.models.catalogue import MODELS
from kvcore.models.memory import KVLayout
from kvcore.plugins import Plugins
from kvcore.serving import Batching, simulate
from kvcore.trace import Trace
from kvcore_plugins.layer_pools import LayerPools, PooledCache
from kvcore_plugins.rules import SGLang
from kvcore_plugins.workload import Zipf
from kvcore_replay.check.trace import check_trace

STREAMS = 15

POLICIES = sorted(Plugins().names("eviction"))


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("window", "4ff845fecbd0dd61cc9deae0194311b700d771ceaf80200a1e9effe598536c17"),
        ("state", "2243132684e5979d8b349f0b35886475f651c5557de5fa3f18756fee51b28071"),
    ],
)
def test_streams_have_the_answers_of_sglang(kind, digest):
    """Hits, and free and evictable slots after each call, are those of SGLang 0.5.23.

    `tox -e like-sglang` compares these streams with the package, evicted blocks too.
    """
    answers = sha256()
    for seed in range(STREAMS):
        answers.update(drive(seed, kind)[-1].encode())
    assert answers.hexdigest() == digest


def pooled(**options):
    """Return a small cache, with blocks of one token."""
    options = {"prefix": "radix:evict=leaf", "key_tokens": 1, **options}
    return PooledCache(options.pop("blocks", 1000), 1, **options)


def serve(cache, number, keys, chunk=None):
    """Compute a prompt alone on a server, in chunks; return the tokens that hit."""
    request = keyed(number, keys, 1, output_tokens=1)
    hit = cache.probe(request)
    tokens = len(keys) - hit if chunk is None else min(chunk, len(keys) - hit)
    seq = cache.open(request, tokens)
    cache.commit(seq, tokens)
    while seq.tokens < len(keys):
        tokens = min(chunk, len(keys) - seq.tokens)
        cache.extend(seq, tokens)
        cache.commit(seq, tokens)
    cache.close(seq)
    cache.check_integrity()
    return hit


def text(number, length=100):
    """Return the keys of a prompt that no other number has."""
    return tuple((number, index) for index in range(length))


def test_a_tombstone_is_no_hit():
    """A prefix whose window is evicted is not hit, though full attention has it."""
    cache = pooled(blocks=9000, window=9, window_slots=170)
    assert serve(cache, 0, text(0)) == 0
    assert serve(cache, 1, (*text(0), "more")) == 100
    for index in range(2, 9):
        serve(cache, index, text(index, 150))
    windows = cache.tree.windows
    spans = {span.path_keys[0]: span for span in cache.tree.spans()}
    assert spans[0, 0] not in windows
    assert serve(cache, 9, (*text(0), "again")) == 0


def test_a_hit_ends_where_the_whole_window_is_cached():
    """A prompt that leaves another inside its last window hits nothing of it."""
    cache = pooled(window=9, window_slots=500)
    serve(cache, 0, text(0))
    # Before the last nine tokens the windows have passed.
    assert serve(cache, 1, (*text(0)[:95], "other")) == 0
    assert serve(cache, 2, (*text(0)[:95], "other", "more")) == 95


def test_a_hit_ends_where_a_state_was_kept():
    """States are kept at the last multiple of 64 tokens of a chunk; hits end there."""
    cache = pooled(state_slots=20)
    assert serve(cache, 0, text(0, 300), chunk=150) == 0
    # The second chunk begins at 150, and keeps the state after 128 tokens of it.
    assert serve(cache, 1, (*text(0, 300), "more")) == 278
    assert serve(cache, 2, (*text(0, 200), "other")) == 128


def test_chunks_without_a_state_free_what_the_window_has_passed():
    """A prompt in chunks too short to keep a state takes no more window slots than others."""
    cache = pooled(window=9, window_slots=146, state_slots=20)
    assert serve(cache, 0, text(0, 300), chunk=30) == 0


def test_a_junction_gets_a_state():
    """The state at which a prompt leaves another is kept, so that a third one hits there."""
    cache = pooled(state_slots=20)
    serve(cache, 0, text(0, 300))
    assert serve(cache, 1, (*text(0, 130), *text(1, 200))) == 0
    assert serve(cache, 2, (*text(0, 130), *text(2, 200))) == 128


@pytest.mark.parametrize(
    "pools",
    [{"window": 17, "window_slots": 1000}, {"state_slots": 50}],
    ids=["window", "state"],
)
@pytest.mark.parametrize(
    ("prompt", "keys"),
    [(448, [1, 2, 3, 40]), (448, [1, 2, 3]), (512, [1, 2, 3]), (540, [1, 2, 3])],
)
def test_the_next_turn_resumes_after_the_last_whole_key(prompt, keys, pools, tmp_path):
    """A prompt of 3 keys, of 8 blocks each, and more: the rest has another key in the next.

    Or it has none.
    """
    prompts = [(prompt, keys), (640, [1, 2, 3, 41, 50])]
    requests = [
        Request(
            id=index, arrival=index * 10**9, prompt_tokens=tokens, output_tokens=1, keys=keys,
            key_tokens=128,
        )
        for index, (tokens, keys) in enumerate(prompts)
    ]  # fmt: skip
    with Trace(tmp_path / "trace.jsonl") as trace:
        cache = PooledCache(
            1000, 16, prefix="radix:evict=leaf", key_tokens=128, trace=trace, **pools
        )
        batching = Batching(max_tokens=1024, rules=SGLang())
        simulate(requests, cache=cache, batching=batching)
    assert cache.stats.hit_tokens == 384
    check_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy_orders_full_attention(policy):
    """Every built-in policy serves streams, with all invariants, or is refused by name."""
    for kind in ("window", "state"):
        pools = Pools.random(Random(7), kind)
        if Plugins().get("eviction", policy).expires_spans:
            with pytest.raises(InputError, match="lets blocks expire"):
                CacheSide(pools, policy)
            continue
        assert drive(3, kind, eviction=policy, requests=30)[2] > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefix": "radix"}, "prefix='radix:evict=leaf'"),
        ({"window_slots": 100}, "are too few; give 146 or more, with more blocks or memory"),
        ({"window": 1}, "a window has 2 tokens or more"),
        ({"state_slots": 4}, "4 state slots are too few; give 5 or more, with more blocks"),
    ],
)
def test_parts_that_pools_cannot_have_are_refused(options, match):
    """The error says what to give instead."""
    with pytest.raises(InputError, match=match):
        pooled(**{"window": 9, "window_slots": 500, **options})


def test_a_retention_policy_is_refused():
    """Pools keep what a layer needs, and no policy forgets more."""
    pytest.importorskip("kvcore_engine")
    with pytest.raises(InputError, match="a retention policy"):
        pooled(window=9, window_slots=500, retention="window:tokens=64")


@pytest.mark.parametrize("rules", [{"commit": "scheduled"}, {"reserve": "prompt"}])
def test_blocks_are_allocated_by_chunk_and_shared_once_they_are_computed(rules):
    """Rules that share before, or allocate whole prompts, are refused with what to give."""
    batching = Batching(rules=SGLang(**rules))
    with pytest.raises(InputError, match="give commit=computed and reserve=chunk"):
        simulate([], cache=pooled(window=9, window_slots=500), batching=batching)


@pytest.mark.parametrize(
    ("options", "call", "lacking"),
    [
        (
            {"window": 9, "window_slots": 146},
            lambda cache, seq: cache.extend(seq, 150),
            "150 more window slots; 142 of 146 are free",
        ),
        (
            {"state_slots": 9},
            lambda cache, _: cache.open(keyed(1, text(1, 4), 1)),
            "one of the 1 places for requests that run",
        ),
    ],
)
def test_an_error_names_the_pool_that_is_full(options, call, lacking):
    """A request for which there are blocks of full attention is told what it lacks."""
    cache = pooled(**options)
    seq = cache.open(keyed(0, text(0, 4), 1))
    with pytest.raises(OutOfBlocks, match=lacking):
        call(cache, seq)


@pytest.mark.parametrize("call", ["fork", "rollback", "compact"])
def test_what_pools_beside_full_attention_lack_is_refused(call):
    """A call for which only the pool of full attention has rules changes nothing."""
    cache = pooled(window=9, window_slots=500)
    seq = cache.open(keyed(0, text(0), 1))
    with pytest.raises(InputError, match="no forks, rollbacks, compactions or prefetches"):
        getattr(cache, call)(seq, 1)
    cache.check_integrity()


def test_a_refused_admission_evicts_nothing():
    """A request for which full attention has too few blocks takes no state from others."""
    cache = pooled(blocks=400, state_slots=5)
    serve(cache, 0, text(0))
    long = keyed(1, text(1, 200), 1, output_tokens=1)
    running = cache.open(long, 200)
    states = cache.tree.states
    states.take(states.free)
    with pytest.raises(OutOfBlocks):
        cache.open(keyed(2, text(2, 300), 1), 300)
    assert states.evictable == 1
    cache.close(running)


def test_a_refused_call_takes_no_slot():
    """A wrong number of tokens is refused, and a sequence that is closed, as by any cache."""
    cache = pooled(window=9, window_slots=500, state_slots=20)
    with pytest.raises(InputError, match="first -1 tokens"):
        cache.open(keyed(0, text(0), 1), -1)
    cache.check_integrity()
    seq = cache.open(keyed(1, text(1), 1))
    cache.close(seq)
    for call in (cache.commit, cache.extend):
        with pytest.raises(InputError, match="is closed"):
            call(seq, 1)
    cache.check_integrity()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_pools_take_the_memory_that_there_is(name):
    """The pools of a model take all of the memory but what rounding leaves."""
    layout = KVLayout(MODELS[name], "bf16", 16)
    pools = LayerPools.from_layout(layout, 1)
    kinds = {cache.kind for cache in MODELS[name].layer_caches}
    if pools is None:
        assert kinds != {"full", "window"} or name.startswith("gemma-4")
        return
    blocks = 300 * 2**30 // pools.bytes_per_block
    windows, states = pools.slots(blocks)
    used = Fraction(0)
    for cache in MODELS[name].layer_caches:
        if cache.kind == "shared":
            continue
        slots = windows if cache.window else blocks
        one = slots * 16 * layout.cache_bytes(cache) + (states or 0) * cache.state_bytes
        used += cache.layers * one
    assert 0.999 < used / (300 * 2**30) <= 1


@pytest.mark.parametrize("model", ["gemma-3-12b", "qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_like_sglang_serves_a_hybrid_model_in_pools(model):
    """Rules of SGLang give a hybrid model its pools, which a run and its document show."""
    workload = Zipf(requests=150, rate=20, key_tokens=16)
    parts = RunConfig(
        model=model, like="sglang", device="h200", tensor_parallel=2, block_size=16
    ).build(workload=workload)
    result = parts.run()
    assert isinstance(result.cache, PooledCache)
    result.cache.check_integrity()
    document = parts.document(result)
    assert document["hit"]["hit_tokens"] > 0
    assert (
        document["config"]["layer_pools"]
        == parts.layers.as_dict(parts.blocks, 0)["layer_pools"]
    )


@pytest.mark.parametrize("seed", range(9))
def test_jumps_change_no_decision(seed):
    """Many decode steps at once end as step by step: times, evictions, free slots."""
    ends = []
    for jumps in (True, False):
        result, cache = pooled_run(seed, jumps=jumps)
        cache.check_integrity()
        sides = [(side.free, side.available) for side in cache.tree.sides]
        ends.append(({**result.summary(), "wall_s": 0}, cache.pool.free_blocks, sides))
    assert ends[0] == ends[1]
    assert ends[0][0]["completed"] == 40
    assert ends[0][0]["evicted_blocks"] > 0


def test_a_model_without_pools_is_named():
    """SGLang's rules refuse a model with compressed K/V, and say whose rules serve it."""
    with pytest.raises(InputError, match="deepseek-v4-flash has layers without a pool of"):
        kvcore.simulate("zipf:requests=1", model="deepseek-v4-flash", like="sglang")
