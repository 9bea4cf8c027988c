"""Serving from cache groups: jumps, chunks, and what is refused."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from random import Random
from typing import get_args

import attrs
import orjson
import pytest
from helpers.grouped_requests import FULL, GROUPS, STATE, WINDOW, grouped_requests
from helpers.jobs import job as job_of
from helpers.serving import Even

from kvcore import CheckpointPolicy, HostedGroups, Request, Trace
from kvcore.cache import KVCache
from kvcore.config import RunConfig
from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS
from kvcore.request import Hints
from kvcore.serving import Batching, DecodeSteps, Rules, simulate
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.job import DECODE, admission_of
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.loop import ServingLoop
from kvcore.serving.stats import TokenGaps
from kvcore.workloads.arrivals import Arrivals
from kvcore_cli.report.simulation import group_text
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.cache_groups.groups import GroupKind
from kvcore_plugins.cache_groups.plan import groups_of
from kvcore_plugins.cache_groups.segments import SegmentedGroups
from kvcore_plugins.rules import VLLM
from kvcore_plugins.scheduler import FCFS
from kvcore_plugins.workload import Zipf
from kvcore_replay.check.trace import check_trace

PLAIN = Request(id=0, prompt_tokens=20, key_tokens=8)
"""A request that hits nothing."""


@pytest.mark.parametrize("rules", [None, "vllm:lag=0", "vllm", "sglang"])
@pytest.mark.parametrize("groups", GROUPS)
def test_jumps_change_no_decision(groups, rules):
    """Many decode steps at once end as step by step: times, evictions, free blocks."""
    runs = []
    for jumps in (True, False):
        cache = GroupedCache(GROUPS[groups], 90, checkpoint="chunk")
        batching = Batching(rules=rules, max_tokens=64, max_seqs=16)
        served = grouped_requests(f"{groups}/{rules}")
        result = simulate(served, cache=cache, batching=batching, jumps=jumps)
        cache.check_integrity()
        assert cache.stats.requests == len(served)
        summary = {**result.summary(), "wall_s": 0}
        runs.append((summary, cache.pool.free_blocks, cache.unpinned_blocks))
    assert runs[0] == runs[1]
    assert runs[0][0]["requests"] == 40
    assert runs[0][0]["evicted_blocks"] > 0


def test_one_group_of_full_attention_serves_as_a_cache_of_spans():
    """Requests that share nothing take the time and the steps that a `KVCache` gives them."""
    served = [
        Request(id=n, arrival=n * 10**7, prompt_tokens=50 + n, output_tokens=20, key_tokens=8)
        for n in range(60)
    ]
    batching, results = Batching(rules="vllm:lag=0", max_tokens=128, max_seqs=16), []
    for cache in (GroupedCache([FULL], 400), KVCache(400, 8)):
        summary = simulate(served, cache=cache, batching=batching, residency=False).summary()
        results.append(
            {name: summary[name] for name in ("steps", "simulated_s", "preemptions")}
        )
    assert results[0] == results[1]


@pytest.mark.parametrize(("commit", "times"), [("scheduled", [0, 80]), ("computed", [10, 90])])
def test_blocks_are_shared_once_they_are_scheduled_or_computed(commit, times):
    """Of a prompt of 8 tokens and 12 generated ones, two blocks are full at 0 and at 80 ns.

    They can hit then, or as the step ends that computes their last token.
    """
    file, asked = BytesIO(), {"prompt_tokens": 8, "output_tokens": 12, "key_tokens": 8}
    served = [Request(id="a", keys=[1], output_keys=[2, 3], **asked)]
    batching = Batching(rules=Rules(commit=commit))
    with Trace(file) as trace:
        cache = GroupedCache([FULL], 100, key_tokens=8, trace=trace)
        simulate(served, cache=cache, batching=batching, latency=Even())
    lines = map(orjson.loads, file.getvalue().splitlines())
    assert [line["t"] for line in lines if line["event"] == "COMMIT"] == times


def test_a_state_cuts_chunks_at_its_blocks():
    """A chunk ends at a multiple of the block, at the last one of the prompt, at boundaries."""
    cache = GroupedCache([FULL, STATE], 100)

    def cut(start, tokens, prompt, *boundaries):
        return cache.chunk_tokens(start, tokens, prompt, prompt, boundaries, 64)

    assert cut(0, 30, 100) == 24
    assert cut(0, 100, 100) == 96  # the last block that a later request can resume after
    assert cut(96, 4, 100) == 4
    assert cut(0, 64, 100, 40, 63) == 40
    assert cut(0, 5, 100) == 0  # too few tokens for a block: it waits
    assert cut(5, 30, 35) == 3  # within a block
    assert GroupedCache([FULL, WINDOW], 100).chunk_tokens(0, 30, 100, 100, (), 64) == 30


def test_a_prompt_that_is_not_chunked_delays_no_sequence():
    """A step with a whole prompt that is longer than its tokens decodes all the same."""
    asked = {"key_tokens": 8}
    served = [
        Request(id="a", arrival=0, prompt_tokens=8, output_tokens=12, **asked),
        Request(id="b", arrival=25, prompt_tokens=100, output_tokens=3, **asked),
    ]
    batching = Batching(max_tokens=32, max_seqs=4, chunked=False)
    log = simulate(
        served, cache=GroupedCache([FULL], 400), batching=batching, latency=Even()
    ).log
    assert dict(zip(log.ids, log.finish, strict=True)) == {"a": 120, "b": 60}


def test_a_whole_prompt_without_room_in_a_window_is_rejected(tmp_path):
    """A prompt that is not chunked takes all its blocks in every group, also in its trace."""
    served = [
        Request(id=tokens, prompt_tokens=tokens, output_tokens=3, key_tokens=8)
        for tokens in (100, 200, 150)
    ]
    batching = Batching(max_tokens=32, max_seqs=4, chunked=False)
    with Trace(tmp_path / "trace.jsonl") as trace:
        cache = GroupedCache([FULL, WINDOW], 40, trace=trace)
        log = simulate(served, cache=cache, batching=batching, latency=Even()).log
    assert [*log.reasons.values()] == ["it needs 52 blocks; the pool has 40"]
    assert check_trace(tmp_path / "trace.jsonl").rejected == 1


@pytest.mark.parametrize("jumps", [True, False])
def test_a_sequence_waits_to_which_a_prompt_before_it_leaves_no_token(jumps):
    """Running requests have the tokens of a step in order of admission, whatever they do.

    The prompt of `a` is cut where it departs from that of `first`, which leaves tokens to `b`;
    its next chunk takes all 32 of the step, and `b` generates its next token after that.
    """
    cache = GroupedCache([FULL, STATE], 100, key_tokens=8)
    shared, own = list(range(3)), list(range(10, 18))

    def prompt(name, at, keys, output):
        tokens = {"prompt_tokens": 8 * len(keys), "output_tokens": output}
        return Request(id=name, arrival=at, keys=keys, key_tokens=8, **tokens)

    served = [
        prompt("first", 0, [*shared, *range(3, 9)], 1),
        prompt("a", 100, [*shared, *own], 1),
        prompt("b", 100, [20], 5),
    ]
    batching = Batching(rules="vllm:lag=0", max_tokens=32, max_seqs=4, watermark=0)
    log = simulate(served, cache=cache, batching=batching, latency=Even(), jumps=jumps).log
    cache.check_integrity()
    rows = dict(zip(log.ids, zip(log.first_token, log.finish, strict=True), strict=True))
    assert rows == {"first": (30, 30), "a": (140, 140), "b": (110, 160)}
    assert log.steps == 9


class Greedy(VLLM):
    """vLLM's rules, asked for the chunks of prompts, and of none where no token is left."""

    name = "greedy"

    def chunk_tokens(self, job, tokens, state):
        """Return the chunk of vLLM."""
        assert state.budget > 0
        return super().chunk_tokens(job, tokens, state)


class InOrder:
    """A meter that checks how each plan divides the tokens of its step."""

    def passed(self, *part):
        """Ignore what a step has done."""

    def planned(self, loop, now):
        """Check that each running job has what those admitted before it leave, up to its need.

        A chunk is cut where the cache lets it end; a job that decodes needs one token.
        """
        batcher = loop.batcher
        left, chunks = batcher.batching.max_tokens, dict(batcher.chunks)
        for job in sorted(batcher.running, key=admission_of):
            if job.stage == DECODE:
                tokens = 1
            else:
                assert job.seq.computed == job.computed
                tokens = min(job.prefill_left, left)
                tokens = loop.allocator.chunk_tokens(job, tokens) if tokens else 0
                assert chunks.pop(job, 0) == tokens
            left -= tokens
            assert left >= 0
        assert not chunks


def requests_that_branch(seed):
    """Return requests with prompts whose states are cut where they branch, and short ones."""
    rng, made, now = Random(seed), [], 0
    for number in range(40):
        now += rng.randrange(40)
        keys, tokens, output = [], rng.randrange(1, 8), rng.randrange(3, 60)
        if rng.random() < 0.5:
            keys = [*range(rng.randrange(1, 12))]
            keys += [f"{number}/{index}" for index in range(rng.randrange(6, 20))]
            tokens, output = 8 * len(keys) + rng.randrange(8), rng.choice((1, 3, 20))
        fields = {"prompt_tokens": tokens, "output_tokens": output}
        made.append(Request(id=number, arrival=now, keys=keys, key_tokens=8, **fields))
    return made


@pytest.mark.parametrize(("seed", "rules"), [(4, Greedy), (6, Greedy), (6, VLLM)])
def test_running_requests_have_the_tokens_of_a_step_in_order_of_admission(seed, rules):
    """Each plan gives tokens to requests in order, whether they prefill, decode or wait."""
    ServingLoop(
        Arrivals(requests_that_branch(seed)),
        GroupedCache(GROUPS["three"], 2000, key_tokens=8, checkpoint="chunk"),
        FCFS(),
        SimulatedExecutor(Even()),
        Batching(rules=rules(lag=0), max_tokens=32, max_seqs=16, watermark=0),
        meter=InOrder(),
    ).run()


def test_a_junction_at_the_end_of_a_prompt_is_a_stop_after_a_preemption():
    """The chunk of a resumed request ends at the junction, and not at its own prompt's end."""
    cache = GroupedCache([FULL, STATE], 100, key_tokens=8)
    resumed = {"start": 0, "tokens": 137, "prompt": 57, "target": 137, "largest": 512}
    assert cache.chunk_tokens(**resumed, boundaries=(56, 56)) == 56
    assert cache.chunk_tokens(**resumed, boundaries=(56, 0)) == 136


def test_a_window_is_free_once_it_has_passed():
    """A running sequence holds the blocks of its window, not those of its whole text."""
    cache, most = GroupedCache([WINDOW], 100), []
    request = Request(id=0, arrival=0, prompt_tokens=800, output_tokens=1, key_tokens=8)
    seq = cache.open(request, 64)
    while seq.tokens < 800:
        most.append(cache.pool.blocks - cache.available_blocks)
        cache.commit(seq, seq.tokens - seq.computed)
        cache.extend(seq, min(64, 800 - seq.tokens))
    assert max(most) == 12  # of a chunk and the window before it, of 100
    assert cache.evicted_blocks == 0


def test_chunks_that_blocks_do_not_divide_find_the_blocks_that_they_need(tmp_path):
    """Requests of which each fills the pool are served, and the check accepts their trace."""
    file = tmp_path / "trace.jsonl"
    options = {"prompt_tokens": 80, "output_tokens": 300, "key_tokens": 16}
    requests = [Request(id=index, **options) for index in range(3)]
    with Trace(file) as trace:
        cache = GroupedCache([LayerGroup("chunk", 16, 30)], 3, key_tokens=16, trace=trace)
        batching = Batching(max_tokens=1, max_seqs=1)
        result = simulate(requests, cache=cache, batching=batching)
    assert result.summary()["completed"] == 3
    assert check_trace(file).complete


def test_a_job_fits_with_its_whole_prompt_and_the_reserve():
    """A job fits if the blocks that its prompt needs and the reserve are free or evictable.

    It does not while the planned step computes a state that it would hit.
    """
    cache = GroupedCache([FULL, STATE], 30)
    batch = DecodeBatch(DecodeSteps(), 8, (None,), TokenGaps())
    allocator = cache.allocator(batch, Batching(max_tokens=64, max_seqs=8))
    request = Request(id="a", prompt_tokens=41, keys=range(5), key_tokens=8)
    fitting = job_of(request)
    need = cache.need(cache.match(request), 41, whole=True)
    assert need == 6 + 1
    assert allocator.fits(fitting, 0, 30 - need)
    assert not allocator.fits(fitting, 0, 30 - need + 1)
    seq = cache.open(attrs.evolve(request, id="b"), 40)
    cache.publish(seq, 40, 0)
    assert cache.match(request).tokens == 40
    assert not allocator.fits(fitting, 0, 0)
    cache.commit(seq, 40, 0)
    assert allocator.fits(fitting, 0, 0)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LayerGroup("ring", 8), "there are: full, window, chunk, state"),
        (lambda: LayerGroup("full", 0), "1 or more"),
        (lambda: LayerGroup("window", 8), "give a window or a chunk"),
        (lambda: LayerGroup("window", 8, 1), "2 or more"),
        (lambda: GroupedCache([], 9), "a cache without groups"),
        (lambda: GroupedCache([FULL], 9, checkpoint="every:tokens=12"), "give 0 or a multiple"),
        (lambda: GroupedCache([FULL], 9, eviction="lfu"), "is evicted by lru"),
    ],
)
def test_groups_that_cannot_be_are_refused(make, problem):
    """Groups, intervals and policies that cannot be raise InputError, which says what to do."""
    with pytest.raises(InputError, match=problem):
        make()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda cache, _: cache.open(PLAIN, -1), "first -1 tokens"),
        (lambda cache, seq: cache.extend(seq, -1), "extend by -1 tokens"),
        (lambda cache, seq: cache.commit(seq, 21), "commit of 21 tokens"),
        (lambda cache, seq: (cache.close(seq), cache.commit(seq, 0)), "is closed"),
        (lambda cache, seq: (cache.close(seq), cache.extend(seq, 1)), "is closed"),
        (lambda cache, seq: (cache.close(seq), cache.close(seq)), "is closed"),
        (lambda _, seq: GroupedCache([FULL], 9).close(seq), "is not of this cache"),
    ],
)
@pytest.mark.parametrize(
    "make", [GroupedCache, partial(HostedGroups, eviction="lfu"), SegmentedGroups]
)
def test_wrong_calls_of_groups_are_refused(make, call, problem):
    """A number below 0, and a sequence that is not open here, raise InputError."""
    cache = make([FULL, STATE], 9)
    seq = cache.open(PLAIN)
    with pytest.raises(InputError, match=problem):
        call(cache, seq)
    cache.check_integrity()


@pytest.mark.parametrize(
    "make",
    [
        partial(GroupedCache, [FULL], 0),
        partial(GroupedCache, [FULL], 9, key_tokens=3),
        partial(GroupedCache, [FULL], 9, eviction="lfu"),
        partial(HostedGroups, [FULL], 9, eviction="ttl"),
        partial(SegmentedGroups, [FULL], 9),
    ],
)
def test_groups_that_are_refused_leave_their_policy_unused(make):
    """A checkpoint policy can be used if the cache was refused because of another part."""
    policy = CheckpointPolicy()
    with pytest.raises(InputError):
        make(checkpoint=policy)
    assert GroupedCache([FULL], 9, checkpoint=policy).checkpoint is policy


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fragmentation": True}, "fragmentation with cache groups"),
        ({"drafter": "acceptance"}, "drafter with cache groups"),
        ({"batching": Batching(chunked=False)}, "chunked=False with a model that keeps states"),
    ],
)
def test_parts_that_do_not_know_groups_are_refused(options, problem):
    """A part that does not know groups raises InputError."""
    cache = GroupedCache([FULL, STATE], 100)
    with pytest.raises(InputError, match=problem):
        simulate(grouped_requests(0), cache=cache, **options)


def test_hints_for_eviction_are_refused():
    """A request with a pin raises InputError, since groups are evicted by LRU alone."""
    pinned = Request(id=0, prompt_tokens=20, key_tokens=8, hints=Hints(pin=10))
    with pytest.raises(InputError, match="hints for eviction"):
        simulate([pinned], cache=GroupedCache([FULL], 100))


def build(**options):
    """Return the parts of a run of gemma-3-12b."""
    workload = Zipf(requests=20, rate=5)
    given = {"model": "gemma-3-12b", "tensor_parallel": 1, **options}
    return RunConfig(**given).build(workload=workload)


@pytest.mark.parametrize(
    "options",
    [
        {"retention": "window:tokens=64"},
        {"eviction": "ttl:ttl=5"},
    ],
)
def test_options_that_do_not_know_groups_are_refused(options):
    """An option that groups do not know is refused, and served as one group."""
    pytest.importorskip("kvcore_engine")
    (name,) = options
    with pytest.raises(InputError, match=f"^{name}: .*one group"):
        build(**options).run()
    one = build(**options, disable_hybrid_kv_cache_manager=True)
    assert isinstance(one.served_cache(), KVCache)


def test_a_model_with_windows_is_served_in_groups():
    """gemma-3-12b has vLLM's six groups, in a pool of blocks for any of them."""
    parts = build(memory="45GiB")
    cache = parts.served_cache()
    kinds = [(group.kind, group.layers, group.window) for group in cache.groups]
    assert sorted(kinds, key=str) == [("full", 8, None), *[("window", 8, 1024)] * 5]
    assert cache.pool.blocks == 46_080
    assert isinstance(build(model="llama-3.1-8b").served_cache(), KVCache)


def test_rules_without_groups_and_pools_serve_one():
    """An engine whose rules know neither has one pool, in which all layers keep all tokens."""

    class Plain(Rules):
        name = "plain"

        def layer_plan(self, layout, devices):
            return None

    assert isinstance(build(like=Plain()).served_cache(), KVCache)


def test_duplicates_of_vllm_are_kept_in_one_group():
    """With `duplicates` a model of one kind of layer has a group whose blocks have copies."""
    assert isinstance(build(model="llama-3.1-8b", like="vllm").served_cache(), KVCache)
    parts = build(model="llama-3.1-8b", like="vllm:duplicates=true")
    assert [(group.kind, group.layers) for group in parts.layers.groups] == [("full", 32)]
    cache = parts.served_cache()
    request = Request(
        id=0, arrival=0, prompt_tokens=16, output_tokens=0, keys=[1], key_tokens=16
    )
    for name in range(2):
        seq = cache.open(attrs.evolve(request, id=name), now=0)
        cache.commit(seq, 16, 0)
        cache.close(seq, 0)
    assert cache.unpinned_blocks == 2


@pytest.mark.parametrize(
    "model",
    [
        *("jamba-v0.1", "qwen3-next-80b-a3b", "qwen3.5-27b", "kimi-linear-48b-a3b"),
        "nemotron-3-nano-30b-a3b",
    ],
)
def test_blocks_fit_a_state_and_the_keys_where_no_size_is_given(model):
    """Without a block size, blocks beside a state are a multiple of the keys of a workload."""
    workload = Zipf(requests=20, rate=5, key_tokens=512)
    parts = RunConfig(model=model).build(workload=workload)
    assert parts.geometry.block_size == 512
    given = RunConfig(model=model, block_size=512).build(workload=workload)
    assert (parts.blocks, parts.layers) == (given.blocks, given.layers)


def test_blocks_stay_small_where_they_fit_the_keys():
    """Where blocks of 16 tokens fit the keys of the workload, a state changes nothing."""
    workload = Zipf(requests=20, rate=5, key_tokens=16)
    assert RunConfig(model="jamba-v0.1").build(workload=workload).geometry.block_size == 16


def test_keys_that_do_not_fit_the_blocks_of_states_are_refused():
    """Blocks into which a state fits are named, with a block size that fits the keys."""
    workload = Zipf(requests=20, rate=5, key_tokens=512)
    config = RunConfig(model="qwen3-next-80b-a3b", block_size=16)
    with pytest.raises(InputError, match=r"^block_size: .*528 tokens.* Give block_size=512,"):
        config.build(workload=workload)
    groups = config.changed(block_size=512).build(workload=workload).served_cache().groups
    assert {(group.kind, group.block_size) for group in groups} == {
        ("full", 1024),
        ("state", 1024),
    }


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_pool_holds_the_requests_that_are_sized(name):
    """For every model the pool of a run has the blocks of `groups_of`, as `size` says."""
    options = {"model": name, "memory": "300GiB", "tensor_parallel": 1, "codec": "fp16"}
    try:
        parts = build(**options)
    except InputError:
        pytest.skip("no rule for what its layers keep")
    plan = parts.layers or groups_of(MODELS[name])
    blocks = plan.blocks_in(300 * 2**30)
    assert parts.blocks == blocks >= plan.blocks_for(32_768)


@pytest.mark.parametrize("kind", get_args(GroupKind))
def test_every_kind_of_group_has_words(kind):
    """The report on a run names what a group of any kind keeps."""
    group = LayerGroup(kind, 16, 64 if kind in ("window", "chunk") else None)
    assert group_text(attrs.asdict(group)).startswith("1 layer, a")
