"""The hint `prefetch`: blocks of a prompt are loaded from tiers before its request arrives."""

from types import SimpleNamespace

import attrs
import pytest
from helpers.caches import Lines, Mortal, make
from helpers.caches import ask as key
from helpers.caches import start as store
from helpers.engine import SPEC, compute, slot_bytes_of
from helpers.serving import BLOCK, SLOT, Slow, ask, serve
from helpers.traces import lines, seal

from kvcore import KVCache, TraceError
from kvcore.request import NO_HINTS, Hints
from kvcore.serving import StepPlan
from kvcore.serving.job import LOADING
from kvcore_plugins.scheduler import FCFS
from kvcore_replay.check.trace import check_trace
from kvcore_tiers.hierarchy import Tiers

SLOW_LINK = "host:memory=1MB,read_bandwidth=1GB,write_bandwidth=64GB,latency=0"
"""A block of 64 bytes takes 64 ns to read, and 1 ns to write."""


def session(prefetch, *, think=100_000, **hints):
    """Return requests of 4 blocks, of 8 blocks that evict those, and of the first 4 again."""
    keys = [*range(4)]
    return [
        ask("first", 0, 17, keys=keys, session="s"),
        ask("other", 10, 34, keys=[*range(100, 108)]),
        ask(
            "again", 10, 17, keys=keys, session="s", after="first", think_time=think,
            hints=Hints(prefetch=prefetch, **hints),
        ),
    ]  # fmt: skip


def wait(run, name="again"):
    """Return the ns from the arrival of a request to its first token."""
    row = run.rows[name]
    return row["first_token"] - row["arrival"]


def prefetch_counts(run):
    """Return the blocks prefetched, those of them that were hit, and the hits of the tier."""
    stats = run.result.cache.tiers.levels[0].stats
    return stats.prefetched, stats.prefetch_hits, stats.hits


def serve_slowly(requests, **options):
    """Serve `requests` with few blocks and a tier behind a slow link."""
    return serve(requests, **{"blocks": 9, "latency": Slow(), "tiers": (SLOW_LINK,)} | options)


@pytest.mark.parametrize(
    ("prefetch", "ttft", "counts", "hit", "loaded"),
    [
        # Loading 4 blocks takes 256 ns, after writing what they evict; one token is computed.
        (None, 364, (0, 0, 4), 0, 16),
        (50_000, 100, (4, 4, 0), 16, 0),
        # Due at once, while the pool is full; a prefetch is tried only once.
        (10**9, 364, (0, 0, 4), 0, 16),
        (10, 354, (4, 4, 4), 0, 16),
    ],
)
def test_a_prompt_prefetched_in_time_is_hit_without_waiting(
    prefetch, ttft, counts, hit, loaded
):
    """A prompt prefetched in time is a hit in the pool.

    If the prefetch is late, the request waits for the rest of the same transfer; if the pool is
    full when the prefetch is due, the blocks are loaded at the arrival.
    """
    run = serve_slowly(session(prefetch))
    assert (wait(run), prefetch_counts(run)) == (ttft, counts)
    assert (run.result.log.hit[-1], run.result.log.loaded[-1]) == (hit, loaded)
    (level,) = run.result.cache.tiers.levels
    assert level.stats.ratio_sum == level.stats.hits / 4  # blocks that are looked up
    assert level.stats.returned == 0
    assert len(run.of("LOAD_START")) == 1
    tiers = run.result.cache.tiers
    assert not tiers._ahead
    assert not tiers._brought, "what a prefetch has loaded is kept for ever"


@pytest.mark.parametrize(
    ("prefetch", "counts", "ttft"),
    [
        # Loading a block takes 1067 ns, computing it 400; the last token takes 100.
        (4_000, (4, 4, 4), 375),
        (2_700, (2, 2, 0), 900),
        (1_100, (1, 1, 0), 1300),
        (10, (0, 0, 0), 1700),
    ],
)
def test_only_loads_that_save_time_are_prefetched(prefetch, counts, ttft):
    """Over a link slower than computing, only blocks whose load saves time are prefetched."""
    slow = SLOW_LINK.replace("=1GB", "=60MB")
    run = serve_slowly(session(prefetch), tiers=(slow,))
    assert (prefetch_counts(run), wait(run)) == (counts, ttft)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ("memory=1MB", 4),
        ("memory=1MB,load=never", 0),
        ("memory=1MB,max_wait=0,write_bandwidth=1MB", 0),
        ("memory=64", 0),
    ],
)
def test_nothing_is_prefetched_from_a_tier_that_cannot_load(options, blocks):
    """Nothing is prefetched from a tier that never loads, is busy, or holds other blocks.

    From the same tier without these limits four blocks are prefetched.
    """
    third = ask("third", 10_000, 34, keys=[*range(200, 208)])
    run = serve_slowly([*session(50_000), third], tiers=(f"host:{options}",))
    assert prefetch_counts(run)[0] == blocks
    assert len(run.rows) == 4


@pytest.mark.parametrize(("blocks", "prefetched"), [(20, 0), (21, 1), (24, 4)])
def test_no_request_is_preempted_for_a_prefetch(blocks, prefetched):
    """No request is preempted for a prefetch, which loads as many blocks as are not in use.

    When the prefetch is due at 51,700 ns, a request of 20 blocks decodes.
    """
    long = ask("long", 43_900, 77, 4)
    run = serve_slowly([*session(50_000), long], blocks=blocks, watermark=0)
    assert run.rows["long"]["first_token"] < 51_700 < run.rows["long"]["finish"]
    assert (prefetch_counts(run)[0], run.of("PREEMPT")) == (prefetched, [])


def ahead(hints, slots=20, pool=8, *, ids=False):
    """Return tiers with 4 blocks of a request that the pool has lost, and the request."""
    cache = KVCache(pool, BLOCK, accounting="tokens", key_tokens=BLOCK, ids=ids)
    tiers = Tiers(cache, [f"host:memory={slots * SLOT},load=always"], SLOT, ids=ids)
    request = ask("a", prompt=4 * BLOCK + 1, keys=[*range(4)], hints=hints)
    first = attrs.evolve(request, prompt_tokens=4 * BLOCK, hints=NO_HINTS)
    for other in (first, ask("b", prompt=pool * BLOCK, keys=[*range(10, 10 + pool)])):
        seq = cache.open(other)
        cache.commit(seq, seq.tokens)
        cache.close(seq)
    return tiers, request


@pytest.mark.parametrize("hints", [{"pin": 10**9}, {"demote": True}])
def test_hints_take_effect_after_the_request_not_after_its_prefetch(hints):
    """Prefetched blocks are neither pinned nor demoted before their request has come."""
    tiers, request = ahead(Hints(prefetch=1, **hints))
    cache = tiers.cache
    load = tiers.prefetch(request, 0, 10**9, lambda *_: 10**9, 0)
    assert tiers.finish(load, load.ready) == 0
    assert cache.probe(request) == 4
    assert not cache.pins
    cache.open(ask("c", prompt=BLOCK))
    assert cache.probe(request) == 4


def test_a_prefetch_without_room_opens_no_sequence():
    """If no block is left beside its hit and the reserve, there is none."""
    tiers, request = ahead(Hints(prefetch=1))
    cache = tiers.cache
    planned = cache.plan_ahead(request, 0)
    assert cache.open_ahead(planned, 4, 0, cache.available_blocks) is None
    assert not cache.sequences
    assert cache.open_ahead(planned, 4, 0, cache.available_blocks - 1).blocks == 1


def test_a_prefetch_finds_no_expired_blocks():
    """Expired blocks are dropped for the request that used them last: no other has come."""
    cache = make(8, Mortal(), trace=Lines())
    first = store(cache, "ab", now=0)
    cache.close(first, 0)
    seq = cache.open_ahead(cache.plan_ahead(key("abc"), 50), 3, 50, 0)
    assert (seq.hit_blocks, seq.blocks, cache.tree.expired_blocks) == (0, 3, 2)
    (line,) = (fields for event, fields in cache.trace.lines if event == "EVICT")
    assert line["for"] == first.request.id


def test_the_line_of_a_prefetch_has_the_keys_of_its_blocks():
    """Of keys of 4 blocks each, those behind the last block are left out."""
    cache = make(12, trace=Lines(), key_tokens=4 * BLOCK)
    request = ask("a", prompt=12 * BLOCK, keys=[1, 2, 3], key_tokens=4 * BLOCK)
    cache.open_ahead(cache.plan_ahead(request, 0), 5, 0, 0)
    (line,) = (fields for event, fields in cache.trace.lines if event == "PREFETCH")
    assert line["keys"] == [1, 2]


@pytest.mark.parametrize("early", [False, True])
def test_what_could_not_be_written_is_not_loaded(early):
    """Of 4 blocks, of which the last 2 were not written, the first 2 are loaded."""
    tiers, request = ahead(Hints(prefetch=1), ids=True)
    (level,) = tiers.levels
    mover = dict.fromkeys(("store", "load", "dropped"), lambda *_: None)
    mover |= {"is_ready": lambda _: True, "present": lambda _, slots: len(slots)}
    lost = [(level, level._holder("a", None, request.keys, 4), 2)]
    tiers.move_with(SimpleNamespace(lost=lambda: lost, **mover))
    if early:
        load = tiers.prefetch(request, 0, 10**9, lambda *_: 10**9, 0)
    else:
        load = tiers.load(tiers.cache.open(request), 0, lambda *_: 10**9)
    assert [(part.first, part.end) for part in load.parts] == [(0, 2)]


def test_a_prefetch_counts_as_an_admission():
    """A sequence into which blocks are loaded ahead comes after those that were opened."""
    cache = make(8)
    seqs = [cache.open(key("a")), cache.open_ahead(cache.plan_ahead(key("b"), 0), 1, 0, 0)]
    seqs.append(cache.open(key("c")))
    assert [seq.admission for seq in seqs] == [1, 2, 3]


@pytest.mark.parametrize(("room", "parts"), [(1, [1]), (2, [2]), (3, [2, 1]), (9, [2, 2])])
def test_a_prefetch_takes_from_each_level_what_the_pool_has_room_for(room, parts):
    """Of what two levels have, a prefetch loads as many blocks as are beside the reserve.

    No request has asked for them yet: they are loaded, and were not found.
    """
    cache = KVCache(9, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, ["host:memory=1MB,load=always"] * 2, SLOT)
    request = ask("a", prompt=4 * BLOCK + 1, keys=[*range(4)])
    seq = cache.open(request)
    cache.commit(seq, seq.tokens)
    for level, end in zip(tiers.levels, (2, 4), strict=True):
        level.store(seq.span, end, 0, None)
    cache.close(seq)
    cache.tree.discard(next(cache.tree.spans()), 0, "expired")
    load = tiers.prefetch(request, 0, 10**9, lambda *_: 10**9, 9 - room)
    assert [part.end - part.first for part in load.parts] == parts
    assert [level.stats.loads for level in tiers.levels] == [1, len(parts) - 1]
    assert not any(level.stats.found for level in tiers.levels)
    cache.check_integrity()


@pytest.mark.parametrize("hit", [0, 1])
def test_a_prefetch_ends_if_its_blocks_leave_for_what_it_evicts(hit):
    """If the victims of a prefetch take the slots of its own blocks, nothing is loaded.

    What the pool has of the prompt is not pinned either.
    """
    tiers, request = ahead(Hints(prefetch=1, pin=10**9), slots=4 + 4 * hit, pool=4)
    cache = tiers.cache
    for name in [0, 20, 21, 22] * hit:
        seq = cache.open(ask("c", prompt=BLOCK, keys=[name]))
        cache.commit(seq, seq.tokens)
        cache.close(seq)
    assert (cache.probe(request), tiers.levels[0].find([*range(4)], 4, 0)) == (hit, 4)
    assert tiers.prefetch(request, 0, 10**9, lambda *_: 10**9, 0) is None
    cache.check_integrity()
    assert (cache.pool.free_blocks, len(cache.sequences)) == (4 - hit, 0)
    assert not cache.pins


def test_prefetched_blocks_that_have_left_are_no_hits():
    """Blocks that were loaded ahead, and evicted before their request came, are not hit."""
    tiers, request = ahead(Hints(prefetch=1))
    load = tiers.prefetch(request, 0, 10**9, lambda *_: 10**9, 0)
    tiers.finish(load, load.ready)
    cache = tiers.cache
    cache.close(cache.open(ask("c", prompt=8 * BLOCK), now=load.ready))
    assert tiers.load(cache.open(request), load.ready, lambda *_: 10**9) is not None
    stats = tiers.levels[0].stats
    assert (stats.prefetched, stats.prefetch_hits) == (4, 0)


def test_a_request_without_free_blocks_is_admitted_after_a_prefetch():
    """A request that finds no free block is admitted as soon as the prefetch ends."""
    requests = session(1000)
    requests.append(ask("late", 100_800, 24, keys=[*range(200, 206)]))
    slow = f"{SLOW_LINK},load=always".replace("=1GB", "=100MB")
    run = serve_slowly(requests, tiers=(slow,))
    late = run.rows["late"]
    assert late["arrival"] < run.of("LOAD")[0][0] == late["admitted"]
    assert run.of("LOAD")[0][1] == "again"
    assert len(run.rows) == 4


def test_open_loop_requests_are_prefetched():
    """The prompt of an open-loop request is prefetched before the request arrives."""
    keys = [*range(4)]
    requests = [
        ask("first", 0, 17, keys=keys),
        ask("other", 10, 34, keys=[*range(100, 108)]),
        ask("again", 100_000, 17, keys=keys, hints=Hints(prefetch=50_000)),
    ]
    assert wait(serve_slowly(requests)) == 100


@pytest.mark.parametrize(("demote", "written"), [(True, "done"), (False, "older")])
def test_demoted_blocks_are_written_before_older_blocks(demote, written):
    """With `write=evict`, demoted blocks are written to the tier before older blocks."""
    requests = [
        ask("older", 0, 8, keys=[1, 2]),
        ask("done", 1000, 8, keys=[3, 4], hints=Hints(demote=demote)),
        ask("new", 2000, 17, keys=[5, 6, 7, 8]),
    ]
    run = serve(requests, blocks=7, tiers=(SLOW_LINK,))
    assert [line["request"] for line in run.lines if line["event"] == "OFFLOAD"] == [written]


@pytest.mark.parametrize("prefetch", [50_000, 260, 10])
def test_prefetches_change_no_output_on_tensors(prefetch):
    """On tensors, a prefetch changes no output token, and loads are those of the simulation."""
    size = slot_bytes_of(SPEC, BLOCK)
    rate = 6_400_000 * size
    tiers = (f"host:memory=1MB,read_bandwidth={rate},write_bandwidth=64TB,latency=0",)
    requests = [attrs.evolve(each, output_tokens=3) for each in session(prefetch, think=10**6)]
    tensors = compute(requests, latency=Slow(), blocks=9, block_size=BLOCK, tiers=tiers)
    plain = compute(requests, latency=Slow(), blocks=9, block_size=BLOCK)
    assert tensors.result.outputs == plain.result.outputs
    assert tensors.of("PREFETCH")
    simulated = serve(
        requests, latency=Slow(), blocks=9, tiers=tiers, slot_bytes=size, watermark=0.01
    )
    assert tensors.of("LOAD") == simulated.of("LOAD")


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace with a prefetch that finds one block already in the pool."""
    path = tmp_path / "trace.jsonl"
    run = serve_slowly(session(50_000), blocks=10)
    assert [line["blocks"] for line in run.lines if line["event"] == "PREFETCH"] == [1]
    path.write_bytes(run.trace)
    return path


FORGED = [
    ("PREFETCH", {"request": "first"}, "PREFETCH: request 'first' is known already"),
    ("PREFETCH", {"request": "else"}, "EVICT: request 'again' has no REQUEST line before"),
    ("PREFETCH", {"seq": 4}, "PREFETCH: sequence 4 opens; the next one is 3"),
    ("PREFETCH", {"keys": [0, 1, 2]}, "LOAD_START: 3 blocks of request 'again' are in tier"),
    ("PREFETCH", {"keys": [0]}, "PREFETCH: 1 blocks are cached of 1 keys"),
    ("PREFETCH", {"keys": [0, 1, 2, 9]}, "LOAD_START: 3 blocks of request 'again' are in tier"),
    ("PREFETCH", {"blocks": 2}, "PREFETCH: 1 blocks are cached of 4 keys"),
    ("PREFETCH", {"span": 2}, "PREFETCH: span 2 is not what these keys have up to 1"),
    ("PREFETCH", {"span": None}, "PREFETCH: a span is what holds 1 blocks that are cached"),
    ("REQUEST", {"hints": None}, "REQUEST: request 'again' has not asked for a prefetch at"),
    ("REQUEST", {"hints": {"prefetch": 49_999}}, "REQUEST: request 'again' has not asked for"),
    ("REQUEST", {"keys": [0, 1, 2, 9]}, "REQUEST: request 'again' has other keys than its"),
    ("LOAD", {"blocks": 2}, "LOAD: 3 blocks are loaded, not 2"),
    ("COMMIT", {"blocks": 2}, "FREE: sequence 3 frees [(3, 1)], not []"),
]


@pytest.mark.parametrize(("event", "fields", "reason"), FORGED)
def test_a_trace_with_a_forged_field_is_rejected(trace, event, fields, reason):
    """A trace with a false field of a prefetch or its request is rejected with the reason."""
    events = lines(trace)
    begin = next(n for n, line in enumerate(events) if line["event"] == "PREFETCH")
    line = next(line for line in events[begin:] if line["event"] == event)
    line |= fields
    for name in [name for name, value in fields.items() if value is None]:
        del line[name]
    with pytest.raises(TraceError) as found:
        check_trace(seal(trace, events))
    assert str(found.value).split(": ", 1)[1].startswith(reason)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("PREFETCH", "EVICT: request 'again' has no REQUEST line before this"),
        ("ALLOC", "LOAD_START: sequence 3 has 1 blocks, 1 of them already"),
        ("LOAD_START", "LOAD: sequence 3 has no LOAD_START before this"),
        ("LOAD", "COMMIT: sequence 3 waits for what it loads"),
        ("COMMIT", "FREE: sequence 3 frees [(3, -3)], not []"),
        ("FREE", "END: sequences that are not closed: 1"),
    ],
)
def test_a_trace_that_lacks_a_line_is_rejected(trace, event, reason):
    """A trace that lacks one line of a prefetch is rejected with the reason."""
    events = lines(trace)
    begin = next(n for n, line in enumerate(events) if line["event"] == "PREFETCH")
    del events[next(n for n in range(begin, len(events)) if events[n]["event"] == event)]
    with pytest.raises(TraceError) as found:
        check_trace(seal(trace, events))
    assert str(found.value).split(": ", 1)[1].startswith(reason)


def test_a_trace_may_end_before_the_arrival_of_a_request(trace):
    """A trace may end after a prefetch and before the arrival of its request."""
    events = lines(trace)
    end = next(
        n for n, line in enumerate(events) if line["event"] == "REQUEST" and "hints" in line
    )
    report = check_trace(seal(trace, [*events[:end], events[-1]]))
    assert (report.finished, report.pool["private"]) == (2, 0)


class Greedy(FCFS):
    """A scheduler that pauses and admits every loading job in each step."""

    name = "greedy"

    def plan(self, state):
        """Return a plan that pauses all loading jobs, and admits them and all waiting ones."""
        loading = [job for job in state.running if job.stage == LOADING]
        self.named = max(getattr(self, "named", 0), len(loading))
        return StepPlan([*loading, *state.waiting], loading)


def test_loading_jobs_in_a_plan_are_neither_paused_nor_admitted_twice():
    """Loading jobs in a plan are neither paused nor admitted twice."""
    requests = [*session(None), ask("more", 101_750, 8, 3)]
    scheduler = Greedy()
    run = serve_slowly(requests, blocks=12, scheduler=scheduler)
    assert (len(run.rows), scheduler.named) == (4, 1)
    assert (run.of("PREEMPT"), len(run.of("LOAD_START"))) == ([], 1)
