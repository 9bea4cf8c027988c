"""Checkpoint policies: where states are kept, what leaves, and what bounds their hits."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import ClassVar

import attrs
import pytest
from helpers.faults import fail, faulty

import kvcore
from kvcore import CheckpointPolicy, InputError, Plugins, PolicyError, Request
from kvcore.plugins import resolve
from kvcore.serving import Batching, simulate
from kvcore.trace import Trace
from kvcore_plugins.cache_groups import GroupedCache, GroupPlan, LayerGroup
from kvcore_plugins.cache_groups.groups import GroupMatch
from kvcore_plugins.cache_groups.named_blocks import NamedBlocks
from kvcore_plugins.checkpoint import place
from kvcore_plugins.checkpoint.marconi import GRID
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.check.trace import check_trace
from kvcore_replay.untimed import replay_groups
from kvcore_testing.checkpoint import look_up, stream
from kvcore_tiers.grouped import GroupTiers

SIZE = 8
FULL, STATE = LayerGroup("full", SIZE), LayerGroup("state", SIZE)
CHUNK = 32


def build(text):
    """Return the policy of a text."""
    return Plugins().build("checkpoint", text)


def new_cache(policy, blocks=1000, *beside, eviction=None, trace=None):
    """Return a cache with full attention and one group of states, and groups beside them."""
    policy = build(policy) if isinstance(policy, str) else policy
    return GroupPlan((FULL, STATE, *beside), 0).cache(
        blocks, eviction=resolve("eviction", eviction, "lru"), prefix=None, recompute=None,
        checkpoint=policy, key_tokens=SIZE, trace=trace,
    )  # fmt: skip


def request(serial, keys, **options):
    """Return a request whose prompt has a token more than blocks of `keys`."""
    keys = list(keys)
    options = {"output_tokens": 1} | options
    return Request(
        id=serial, arrival=serial * 10**9, prompt_tokens=len(keys) * SIZE + 1, keys=keys,
        key_tokens=SIZE, **options,
    )  # fmt: skip


def test_the_last_token_of_a_prompt_is_left_to_compute():
    """By default a state is wanted below the end of a prompt, and at the junction."""
    whole = Request(
        id=0, prompt_tokens=4 * SIZE, output_tokens=1, keys=range(4), key_tokens=SIZE
    )
    assert [*CheckpointPolicy().boundaries(whole, 0, 16)] == [4 * SIZE - 1, 16]


def hits(policy, prompts, blocks=1000):
    """Return the blocks that each of `prompts` hits, computed one after the other."""
    cache = new_cache(policy, blocks)
    found = [
        cache.compute(request(serial, keys), CHUNK).tokens // SIZE
        for serial, keys in enumerate(prompts)
    ]
    cache.check_integrity()
    return found


def parting(first, shared, length=12):
    """Return a prompt whose blocks are those from 0 on up to `shared`, and then its own."""
    return [*range(shared), *range(1000 * first, 1000 * first + length - shared)]


# Where states are kept: each policy differs from the default on a trace.


@pytest.mark.parametrize(
    ("policy", "second"),
    [("default", 0), ("chunk", 8), ("every:tokens=64", 8), ("every:tokens=128", 0)],
)
def test_a_policy_keeps_states_where_chunks_end(policy, second):
    """A second prompt resumes at the end of a chunk of the first one, if a state is there."""
    assert hits(policy, [parting(1, 10), parting(2, 10)]) == [0, second]


def test_the_default_keeps_a_state_at_a_junction():
    """The third of three prompts that part at one place resumes there."""
    assert hits("default", [parting(n, 6) for n in (1, 2, 3)]) == [0, 0, 6]


@pytest.mark.parametrize("kept", [STATE, LayerGroup("window", SIZE, window=2 * SIZE)])
@pytest.mark.parametrize("policy", ["default", "every:tokens=64", "sparse"])
@pytest.mark.parametrize("known", [[1, 2, 3, 40], [1, 2, 3], [1, 2]])
def test_the_next_turn_resumes_after_the_last_whole_key(known, policy, kept, tmp_path):
    """A prompt of 3 keys and a half, of 4 blocks each: the half has another key in the next.

    Or it has none, and perhaps the third neither.
    """
    trace = Trace(tmp_path / "trace.jsonl")
    cache = GroupedCache(
        (FULL, kept), 1000, checkpoint=build(policy), key_tokens=4 * SIZE, trace=trace
    )
    first, second = (
        Request(
            id=tokens, prompt_tokens=tokens, output_tokens=1, keys=keys, key_tokens=4 * SIZE
        )
        for tokens, keys in ((14 * SIZE, known), (20 * SIZE, [1, 2, 3, 41, 50]))
    )
    assert cache.compute(first, 16 * SIZE).tokens == 0
    assert cache.compute(second, 16 * SIZE).tokens == 4 * min(3, len(known)) * SIZE
    trace.close()
    check_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"keys": [1, 2]}, SIZE * 4),  # the second one is partial
        ({"keys": [1]}, SIZE * 4),  # the rest has no key
        ({"keys": [1], "output_keys": [2]}, SIZE * 6 - 1),  # the rest has a key of the output
        ({"keys": []}, SIZE * 6 - 1),
    ],
)
def test_of_long_keys_the_last_whole_one_ends_a_prompt(options, end):
    """The boundary is the end of the last key that a longer prompt has too, if there is one."""
    policy = CheckpointPolicy()
    policy.unit = SIZE
    asked = Request(
        id=0, prompt_tokens=6 * SIZE, output_tokens=9, key_tokens=4 * SIZE, **options
    )
    assert [*policy.boundaries(asked, 0, 0)] == [end, 0]


def test_sparse_has_states_where_others_have_parted():
    """Two prompts of a new text part where earlier ones did: the second of them resumes there.

    With the default, only a third one would.
    """
    other = [[n + 500 for n in parting(first, 6)] for first in (4, 5)]
    prompts = [*(parting(n, 6) for n in (1, 2, 3)), *other]
    assert hits("sparse:budget=1", prompts) == [0, 0, 6, 0, 6]
    assert hits("default", prompts) == [0, 0, 6, 0, 0]


@pytest.mark.parametrize(("policy", "hit"), [("default", 4), ("marconi", 7), ("chunk", 7)])
def test_marconi_keeps_the_output(policy, hit):
    """The next turn of a chat resumes behind the answer before it, whose keys are known.

    One that departs within the answer resumes at the block before.
    """
    cache = new_cache(policy)
    first = request(0, range(4), output_tokens=3 * SIZE, output_keys=[4, 5, 6])
    simulate([first], cache=cache, batching=Batching(max_tokens=CHUNK, max_seqs=4))
    for length in range(4, 8):
        keys = [*range(length), 99]
        assert cache.match(request(1, keys)).tokens // SIZE == min(length, hit)


# What leaves.


@pytest.mark.parametrize(
    ("policy", "hit"),
    [("default", 0), ("seglen", 20), ("marconi:alpha=2", 20), ("seglen:weight=0", 0)],
)
def test_a_long_segment_is_worth_keeping(policy, hit):
    """Short prompts that never come back push a long one out, unless its length is weighed."""
    short = [range(100 * n, 100 * n + 2) for n in range(1, 20)]
    assert hits(policy, [range(20), *short, range(20)], blocks=50)[-1] == hit


@pytest.mark.parametrize(
    ("policy", "hit"), [("seglen:weight=0", 0), ("seglen:weight=0,cap=1", 4)]
)
def test_a_cap_evicts_what_a_longer_text_has_replaced(policy, hit):
    """States inside a text leave before the last one of another text that is older."""
    turns = [range(100, 100 + 2 * n) for n in range(1, 12)]
    assert hits(policy, [range(4), *turns, range(4)], blocks=36)[-1] == hit


def plain_victim(policy, segments):
    """Return the victim of a policy with weights, by its rule as it is written down."""
    if policy.cap is not None:
        beyond = [s for s in segments if s.resumable and s.below >= policy.cap]
        if beyond:
            return beyond[0]

    def scaled(values):
        span = max(values) - min(values)
        return [(value - min(values)) / span if span else 0.0 for value in values]

    now = max(s.last_use for s in segments) + 1
    recencies = scaled([1 / (now - s.last_use) for s in segments])
    worths = scaled([policy.worth(s) if s.resumable else 0.0 for s in segments])
    for_recency, for_worth = policy.shares
    scores = [for_recency * r + for_worth * w for r, w in zip(recencies, worths, strict=True)]
    return segments[scores.index(min(scores))]


RANKED = [
    *("marconi", "marconi:alpha=0", "marconi:alpha=1e9", "marconi:alpha=0.5,cap=2"),
    *("seglen", "seglen:weight=1", "seglen:weight=0,cap=1", "seglen:weight=0.3"),
]


@pytest.mark.parametrize(("seed", "spec"), [*enumerate(RANKED)])
def test_ranked_segments_leave_as_the_plain_rule_says(seed, spec):
    """Of requests that run side by side, each victim is that of a look at all segments."""
    policy = build(spec)
    ranked, chosen = policy.victim, []

    def victim(segments):
        chosen.append(ranked(segments))
        assert chosen[-1] is plain_victim(policy, list(segments))
        return chosen[-1]

    policy.victim = victim
    cache = new_cache(policy, 160)
    simulate(stream(seed), cache=cache, batching=Batching(max_tokens=64, max_seqs=6))
    assert len(set(chosen)) > 20


def test_tuned_alpha_is_that_whose_prompts_hit_most():
    """Ten times as many requests after the first eviction, the best of all weights is kept."""
    policy, served, first = build("marconi:alpha=tuned"), [], None
    cache = new_cache(policy, 60)
    for each in stream(5):
        cache.compute(each, CHUNK)
        served.append(each)
        if first is None and cache.evicted_blocks:
            first = len(served)
        if policy.shares != (1.0, 0.0):
            break
    assert len(served) == 10 * first
    alone = {alpha: new_cache(f"marconi:alpha={alpha}", 60) for alpha in GRID}
    hit = {a: sum(other.compute(r, CHUNK).tokens for r in served) for a, other in alone.items()}
    assert len(set(hit.values())) > 2
    assert policy.shares == (1.0, max(hit, key=hit.get))


@pytest.mark.parametrize("policy", ["default", "marconi:alpha=1"])
def test_a_request_is_looked_up_unless_its_prefix_is_known(policy):
    """A request is opened with the prefix that it hits, whether that was looked up or not."""
    cache = new_cache(policy)
    cache.compute(request(0, range(8)), CHUNK)
    again = request(1, range(8))
    cache.close(cache.open(again, match=cache.match(again)))
    seq = cache.open(again, resumed=True)
    assert seq.computed == cache.match(again).tokens > 0
    cache.close(seq)
    cache.check_integrity()


def test_a_branch_stays():
    """Segments that can leave come by their order; one behind which texts part is not one."""

    class Watching(CheckpointPolicy):
        """Evicts the least recently used segment, and records what it could evict."""

        name = "watching"
        children: ClassVar[set[int]] = set()

        def victim(self, segments):
            """Return the least recently used segment."""
            self.children.update(s.children for s in segments)
            assert [s.order for s in segments] == sorted(s.order for s in segments)
            return segments[0]

    texts = [parting(n, 4, 8) for n in range(1, 30)]
    assert hits(Watching(), texts, blocks=40) == [0, 0, *[4] * 27]
    hits(Watching(), texts, blocks=20)  # which has room for two branches
    assert max(Watching.children) <= 1


class Upper(CheckpointPolicy):
    """Evicts a segment that has another below it; of equal ones, the newest."""

    name = "upper"

    def victim(self, segments):
        """Return the segment."""
        return max(segments, key=lambda segment: (segment.children, segment.order))


def test_of_a_segment_before_another_its_states_alone_leave():
    """The attention of a segment that leaves stays for a text that runs on behind it."""
    cache = new_cache(Upper(), 24)
    for serial, keys in enumerate((range(6), range(12), range(20, 26))):
        cache.compute(request(serial, keys), CHUNK)
    assert [segment.children for segment in cache._segments] == [1, 0, 0]
    cache.compute(request(3, range(30, 36)), CHUNK)
    found = [cache.match(request(4, keys)).tokens for keys in (range(6), range(12))]
    assert found == [0, 12 * SIZE]


class Below(CheckpointPolicy):
    """Keeps states at multiples of a number that is none."""

    name = "below"
    interval = -16


class Ends(CheckpointPolicy):
    """Evicts the least or most recently used segment, of requests that still run too."""

    name = "ends"
    output = True

    def __init__(self, index):
        """Evict the segment at 0 or -1 in the order of their use."""
        self.index, self.known = index, set()

    def on_changed(self, segment):
        """Refuse a segment of no tokens; keep those that have blocks."""
        assert segment.start < segment.end
        (self.known.add if segment.blocks else self.known.discard)(segment)

    def victim(self, segments):
        """Return the first or the last segment."""
        return segments[self.index]


@pytest.mark.parametrize(
    ("tier", "beside"),
    [
        (None, ()),
        (f"host:memory={90 << 20},load=always", ()),
        (None, [LayerGroup("window", SIZE, 20)]),
        (None, [LayerGroup("chunk", SIZE, 24)]),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_segments_are_a_tree(seed, tier, beside):
    """Each cached block is in one segment; none is below one that has lost its states.

    A segment at which a request can resume has all its blocks of full attention, or borrows
    them, whenever a request ends: blocks of these names are cached. The policy has been told of
    them all, and of those that have left.
    """
    cache = new_cache(Ends(-(seed % 2)), 120, *beside)
    levels = GroupTiers(cache, [tier], 1 << 20).levels if tier else ()
    close = cache.close

    def closed(*arguments, **options):
        """Close a sequence, and look at what segments borrow."""
        close(*arguments, **options)
        for segment in cache._segments:
            lacking = (segment.end - segment.start) // SIZE - len(segment.full)
            borrows = levels or len(segment.borrowed) >= lacking
            assert borrows or not segment.resumable
            assert all(name in cache._cached[group] for group, name in segment.borrowed)
            assert segment.children == len(segment.next)

    cache.close = closed
    simulate(stream(seed), cache=cache, batching=Batching(max_tokens=64, max_seqs=6))
    assert all(level.stats.hits for level in levels)
    segments = list(cache._segments)
    blocks = sorted(block for s in segments for block in (*s.full, *s.kept))
    assert blocks == sorted(block for block, _ in cache._blocks)
    assert cache.checkpoint.known == set(segments)
    for segment in segments:
        above = segment.above
        assert segment.kept or not segment.resumable
        assert segment.blocks == len(segment.full) + len(segment.kept)
        assert segment.start == (0 if above is None else above.end) < segment.end
        if segment.resumable:
            assert above is None or (above.resumable and segment in above.next)
        assert segment.below == (
            1 + next(iter(segment.next)).below if segment.children == 1 else 0
        )
        assert all(child.above is segment for child in segment.next)


def begin(cache, asked):
    """Return the sequence of a request whose prompt is computed, and which runs on."""
    match, seq = cache.match(asked), None
    computed, length = match.tokens, asked.prompt_tokens
    while computed < length:
        rest = min(CHUNK, length - computed)
        tokens = cache.chunk_tokens(computed, rest, length, length, match.boundaries, CHUNK)
        if seq is None:
            seq = cache.open(asked, tokens, match=match)
        else:
            cache.extend(seq, tokens)
        cache.commit(seq, tokens)
        computed += tokens
    return seq


def broken_branch():
    """Return a cache that has lost the state where three texts part, for want of other blocks.

    The second and the third of them ran on; the second has got the blocks before that.
    """
    cache = new_cache(Ends(0), 60)
    cache.compute(request(0, parting(1, 6)), CHUNK)
    running = [begin(cache, request(n, parting(n + 1, 6))) for n in (1, 2)]
    (branch,) = (s for s in cache._segments if s.children == 2)
    cache.compute(request(3, range(5000, 5027)), CHUNK)
    assert not branch.resumable
    for seq in running:
        cache.close(seq)
    cache.check_integrity()
    return cache


def test_a_segment_whose_prefix_has_left_is_not_resumable():
    """Texts that part stand on one prefix: when it leaves with one, none resumes at another."""
    cache = broken_branch()
    text = request(9, parting(3, 6))
    (last,) = (s for s in cache._segments if s.borrowed)
    found = set()
    for n in range(6):
        hit = cache.match(text).tokens
        found.add(hit)
        assert last.resumable == (hit == last.end)
        assert bool(last.seconds) == last.resumable
        cache.compute(request(10 + n, range(6000 + 100 * n, 6005 + 100 * n)), CHUNK)
        cache.check_integrity()
    assert found == {0, 12 * SIZE}


def test_a_segment_whose_prefix_has_come_back_is_resumable_again():
    """When another text has computed the prefix again, a request resumes behind it again."""
    cache = broken_branch()
    (last,) = (s for s in cache._segments if s.borrowed)
    for n in range(3):
        cache.compute(request(10 + n, range(6000 + 100 * n, 6005 + 100 * n)), CHUNK)
    assert last.kept
    assert not last.resumable
    cache.checkpoint.index = -1  # so that it stays
    cache.compute(request(13, range(7)), CHUNK)
    assert cache.compute(request(14, parting(3, 6)), CHUNK).tokens == last.end
    assert last.resumable
    assert last.seconds > 0


# The program.


def test_positions_are_the_best():
    """No other positions save more of random overlaps, by trying all of them."""
    rng = Random(1)
    for _ in range(300):
        overlaps = {rng.randint(0, 12): rng.randint(0, 5) for _ in range(rng.randint(0, 7))}
        budget = rng.randint(1, 4)

        def saved(positions, overlaps=overlaps):
            last = {d: max((p for p in positions if p <= d), default=0) for d in overlaps}
            return sum(count * last[d] for d, count in overlaps.items())

        positions = place(overlaps, budget)
        assert len(positions) <= budget
        tried = (c for n in range(budget + 1) for c in combinations(range(13), n))
        assert saved(positions) == max(map(saved, tried))


def test_a_state_that_came_back_from_a_tier_is_a_boundary_again():
    """A prompt whose state left the pool resumes from a tier, and has a segment again."""
    cache = new_cache("marconi", 14)
    tiers = GroupTiers(cache, [f"host:memory={90 << 20},load=always"], 1 << 20)
    texts = [request(serial, range(8 * serial, 8 * serial + 6)) for serial in range(3)]
    for text in (*texts, attrs.evolve(texts[0], id=9)):
        cache.compute(text, CHUNK)
    (level,) = tiers.levels
    assert level.stats.loaded
    segment = next(reversed(cache._segments))
    while not segment.resumable:
        segment = segment.above
    assert (segment.end, len(segment.kept)) == (6 * SIZE, 1)


# Traces, C, bounds.


@pytest.mark.parametrize("policy", ["marconi", "seglen:weight=0,cap=1", "sparse:budget=2"])
def test_a_trace_is_checked_and_names_the_policy(policy, tmp_path):
    """The trace of a server under pressure passes all checks; its header has the policy."""
    file = tmp_path / "trace.jsonl"
    with Trace(file) as trace:
        cache = new_cache(policy, 160, trace=trace)
        simulate(stream(0), cache=cache, batching=Batching(max_tokens=64, max_seqs=6))
    assert cache.evicted_blocks > 100
    check_trace(file)
    plugin = TraceWorkload(file).header.as_dict()["plugins"]["checkpoint"]
    assert plugin["name"] == policy.partition(":")[0]
    assert plugin["options"] == build(policy).options()


@pytest.mark.parametrize("policy", ["default", "chunk", "every:tokens=16"])
def test_a_header_says_an_interval_as_ever(policy, tmp_path):
    """A policy that is an interval is in the header as one, and not among the plugins."""
    file = tmp_path / "trace.jsonl"
    with Trace(file) as trace:
        new_cache(policy, trace=trace)
    header = TraceWorkload(file).header.as_dict()
    assert "checkpoint" not in header["plugins"]
    interval = {"default": 0, "chunk": None, "every:tokens=16": 16}[policy]
    assert header["cache_groups"]["prefix_cache_retention_interval"] == interval


def test_a_recorded_run_is_made_again(tmp_path):
    """A what-if serves with the recorded policy, or with another one that is asked for."""
    options = {"model": "qwen3-next-80b-a3b", "block_size": 64, "memory": "2GiB"}
    file = tmp_path / "trace.jsonl"
    ran = kvcore.simulate("agents:sessions=8", trace=file, checkpoint="sparse", **options)
    default = kvcore.simulate("agents:sessions=8", **options)
    again, other = (
        kvcore.whatif(file, **changes).rerun.hit["hit_blocks"]
        for changes in ({"scheduler": "fcfs"}, {"checkpoint": "default"})
    )
    assert again == ran.cache.stats.hit_blocks != other == default.cache.stats.hit_blocks


@pytest.mark.parametrize("policy", ["marconi", "seglen:cap=1", "sparse:budget=2", "chunk"])
def test_names_in_c_decide_the_same(policy, monkeypatch):
    """Hits, boundaries and evictions are those of the names of blocks in Python."""
    groups = (FULL, STATE, STATE)
    first = list(look_up(build(policy), stream(3), groups))
    monkeypatch.setattr("kvcore_plugins.cache_groups.cache.named_blocks", NamedBlocks)
    assert list(look_up(build(policy), stream(3), groups)) == first


def test_no_policy_hits_more_than_the_bound():
    """In each pool the bound hits at least as much as any policy; with memory for all, no more.

    A pool that never evicts, with a state at each block, hits all that can hit.
    """
    policies = "default,chunk,marconi:alpha=0.1,seglen:weight=0,cap=1,sparse:budget=8"
    comparison = kvcore.compare(
        "agents:sessions=10", "lru", memory=["2GiB", "6GiB", "400GiB"], accounting="tokens",
        model="qwen3-next-80b-a3b", block_size=64, checkpoint=policies,
    )  # fmt: skip
    bound = {row.blocks: row for row in comparison.rows if row.checkpoint is None}
    assert len(bound) == 3
    for row in comparison.rows:
        assert row.hit_blocks <= bound[row.blocks].hit_blocks <= comparison.infinite.hit_blocks
        assert row.saved_s <= bound[row.blocks].saved_s
        assert row.lookup_blocks == comparison.infinite.lookup_blocks
    assert bound[max(bound)].hit_blocks == comparison.infinite.hit_blocks
    assert len({row.hit_blocks for row in comparison.rows}) > 6


# What is refused.


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            {"boundaries": lambda _, request, *__: [request.prompt_tokens / 2]},
            r"boundaries\(\) with .*give whole tokens",
        ),
        (
            {"victim": lambda *_: kvcore.Segment(0, 8, resumable=True, last_use=1)},
            r"victim\(\) with .*which cannot leave",
        ),
        ({"on_admitted": fail}, "raised ZeroDivisionError in on_admitted"),
        ({"victim": fail, "on_changed": fail}, "raised ZeroDivisionError in on_changed"),
    ],
)
def test_a_wrong_policy_is_named(members, text):
    """An error of a policy names it, the method, and what is wrong; later calls raise it."""
    wrong = faulty("A policy with a fault.", CheckpointPolicy, name="wrong", **members)
    cache = new_cache(wrong(), blocks=30)
    prompts = [request(n, range(100 * n, 100 * n + 9)) for n in range(9)]
    with pytest.raises(PolicyError, match=f"wrong.*{text}"):
        replay_groups(prompts, cache, CHUNK)
    with pytest.raises(PolicyError, match=f"wrong.*{text}"):
        cache.open(request(9, [1]), match=GroupMatch(0, 0, ([], []), ()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: new_cache("marconi", eviction="lfu"), "leave one of them out"),
        (lambda: new_cache("every:tokens=12"), "give 0 or a multiple of 8"),
        (lambda: new_cache(Below()), "multiples of -16 tokens: give 0 or a multiple of 8"),
        (
            lambda: new_cache("marconi:alpha=inf"),
            "alpha=inf: give a finite weight of 0",
        ),
        (
            lambda: kvcore.simulate(
                "agents", model="gemma-3-12b", checkpoint="seglen", limit=1
            ),
            "checkpoint 'seglen' chooses the states that leave, and these groups keep none",
        ),
        (
            lambda: kvcore.simulate(
                "agents", model="qwen3-next-80b-a3b", like="sglang", checkpoint="chunk", limit=1
            ),
            "pools as SGLang's keep states by its own rules",
        ),
        (
            lambda: kvcore.compare("agents", "lru", 9, checkpoint="chunk"),
            "those of cache groups",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    """Policies of another engine, other groups, or beside an eviction policy are refused."""
    with pytest.raises(InputError, match=text):
        make()


@pytest.mark.parametrize(
    ("value", "spec"), [(0, "default"), (None, "chunk"), (1088, "every:tokens=1088")]
)
def test_a_retention_interval_is_a_policy(value, spec):
    """The earlier option of vLLM's name works, with a warning, and chooses the same policy."""
    with pytest.warns(FutureWarning, match="'checkpoint'"):
        config = kvcore.config.RunConfig("simulate", prefix_cache_retention_interval=value)
    assert str(config.checkpoint) == spec
