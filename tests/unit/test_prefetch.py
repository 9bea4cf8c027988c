"""The hint `prefetch`: blocks of a prompt are loaded from tiers before its request arrives."""

import attrs
import pytest
from helpers.engine import SPEC, compute, slot_bytes_of
from helpers.serving import BLOCK, ask, serve
from helpers.traces import lines, seal

from kvcore import LatencyModel, TraceError
from kvcore.analysis import explain
from kvcore.request import Hints
from kvcore.serving import StepPlan
from kvcore.serving.job import LOADING
from kvcore.serving.loop import Arrivals
from kvcore.trace import check_trace
from kvcore_plugins.scheduler import FCFS

SLOW_LINK = "host:memory=1MB,read_bandwidth=1GB,write_bandwidth=64GB,latency=0"
"""A block of 64 bytes takes 64 ns to read, and 1 ns to write."""


@attrs.define(slots=False, eq=False)
class Slow(LatencyModel):
    """A latency model with 100 ns per token of a prompt, and per step with decoding."""

    name = "slow"

    def pieces(self, work):
        """Return one flat piece."""
        return [(100_000 * (work.prefill + (work.decode > 0)), 0)]


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


def told(run):
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
def test_what_comes_ahead_is_not_waited_for(prefetch, ttft, counts, hit, loaded):
    """A prompt prefetched in time is a hit in the pool.

    If the prefetch is late, the request waits for the rest of the same transfer; if the pool is
    full when the prefetch is due, the blocks are loaded at the arrival.
    """
    run = serve_slowly(session(prefetch))
    assert (wait(run), told(run)) == (ttft, counts)
    assert (run.result.log.hit[-1], run.result.log.loaded[-1]) == (hit, loaded)
    assert len(run.of("LOAD_START")) == 1


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
def test_time_before_the_arrival_costs_nothing(prefetch, counts, ttft):
    """Over a link slower than computing, only blocks whose load saves time are prefetched."""
    slow = SLOW_LINK.replace("=1GB", "=60MB")
    run = serve_slowly(session(prefetch), tiers=(slow,))
    assert (told(run), wait(run)) == (counts, ttft)


def test_without_tiers_it_does_nothing():
    """Without tiers the hint changes nothing: all requests have the same rows as without it."""
    run = serve(session(500), blocks=9)
    plain = serve(session(None), blocks=9)
    assert run.rows == plain.rows
    assert not run.of("PREFETCH")


@pytest.mark.parametrize(
    "options",
    ["memory=1MB,load=never", "memory=1MB,max_wait=0,write_bandwidth=1MB", "memory=64"],
)
def test_a_tier_that_cannot_be_asked_is_left_alone(options):
    """Nothing is prefetched from a tier that never loads, is busy, or holds other blocks."""
    run = serve_slowly(session(300, think=1000), tiers=(f"host:{options}",))
    assert told(run)[0] == 0
    assert len(run.rows) == 3


def test_nobody_is_preempted_for_it():
    """No request is preempted for a prefetch: if all blocks are in use, it loads nothing."""
    long = ask("long", 20_000, 34, 800)
    run = serve_slowly([*session(50_000), long], blocks=209, watermark=0)
    assert (told(run)[0], run.of("PREEMPT")) == (0, [])


def test_a_pool_full_of_what_is_on_its_way_blocks_nobody():
    """A request that finds no free block is admitted as soon as the prefetch ends."""
    requests = session(1000)
    requests.append(ask("late", 100_800, 24, keys=[*range(200, 206)]))
    slow = f"{SLOW_LINK},load=always".replace("=1GB", "=100MB")
    run = serve_slowly(requests, tiers=(slow,))
    assert run.of("LOAD")[0][0] == run.rows["late"]["admitted"]
    assert len(run.rows) == 4


def test_blocks_for_those_that_run_are_left():
    """Prefetches keep the watermark free, so a higher one loads fewer blocks."""
    full, kept = (serve_slowly(session(50_000), watermark=watermark) for watermark in (0, 0.6))
    assert (told(full)[0], told(kept)[0]) == (4, 3)


def test_only_what_may_be_shared_comes_ahead():
    """Only blocks within the hint `share` are prefetched, since others cannot be hit."""
    run = serve_slowly(session(50_000, share=9))
    assert told(run)[0] == 2


def test_open_loop_requests_are_known_as_early_as_they_ask():
    """`Arrivals` reads ahead by the longest `prefetch` hint so far, and else by one request."""
    requests = [
        ask(number, 100 * number, hints=Hints(prefetch=250 if number > 2 else None))
        for number in range(8)
    ]
    arrivals, known = Arrivals(requests, prefetches=True), []
    for request in requests:
        assert arrivals.take() == (request.arrival, request)
        known.append(len(arrivals._due))
    assert known == [1, 1, 4, 4, 3, 2, 1, 0]


def test_prefetches_are_collected_for_tiers_alone():
    """`Arrivals` collects prefetches only with `prefetches=True`."""
    arrivals = Arrivals([ask(0), ask(1, 5, hints=Hints(prefetch=3))])
    arrivals.take()
    assert arrivals.prefetch_at > 10**18
    assert not arrivals._ahead


def test_open_loop_requests_are_prefetched():
    """The prompt of an open-loop request is prefetched before the request arrives."""
    keys = [*range(4)]
    requests = [
        ask("first", 0, 17, keys=keys),
        ask("other", 10, 34, keys=[*range(100, 108)]),
        ask("again", 100_000, 17, keys=keys, hints=Hints(prefetch=50_000)),
    ]
    assert wait(serve_slowly(requests)) == 100


def test_demoted_blocks_go_down_first():
    """With `write=evict`, demoted blocks are written to the tier before older blocks."""
    requests = [
        ask("older", 0, 8, keys=[1, 2]),
        ask("done", 1000, 8, keys=[3, 4], hints=Hints(demote=True)),
        ask("new", 2000, 17, keys=[5, 6, 7, 8]),
    ]
    run = serve(requests, blocks=7, tiers=(SLOW_LINK,))
    assert [line["request"] for line in run.lines if line["event"] == "OFFLOAD"] == ["done"]


@pytest.mark.parametrize("prefetch", [50_000, 260, 10])
def test_on_tensors_the_text_is_the_same(prefetch):
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
    ("PREFETCH", {"keys": [0, 1, 2]}, "LOAD_START: "),
    ("PREFETCH", {"keys": [0]}, "PREFETCH: 1 blocks are cached of 1 keys"),
    ("PREFETCH", {"keys": [0, 1, 2, 9]}, "LOAD_START: 3 blocks of request 'again' are in tier"),
    ("PREFETCH", {"blocks": 2}, "PREFETCH: 1 blocks are cached of 4 keys"),
    ("PREFETCH", {"span": 2}, "PREFETCH: span 2 is not what these keys have up to 1"),
    ("PREFETCH", {"span": None}, "PREFETCH: a span is what holds 1 blocks that are cached"),
    ("REQUEST", {"hints": None}, "REQUEST: request 'again' has not asked for a prefetch at"),
    ("REQUEST", {"hints": {"prefetch": 49_999}}, "REQUEST: request 'again' has not asked for"),
    ("REQUEST", {"keys": [0, 1, 2, 9]}, "REQUEST: request 'again' has other keys than its"),
    ("LOAD", {"blocks": 2}, "LOAD: 3 blocks are loaded, not 2"),
    ("COMMIT", {"blocks": 2}, "FREE: sequence 3 frees "),
]


@pytest.mark.parametrize(("event", "fields", "reason"), FORGED)
def test_no_field_can_be_forged(trace, event, fields, reason):
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


@pytest.mark.parametrize("event", ["PREFETCH", "ALLOC", "LOAD_START", "LOAD", "COMMIT", "FREE"])
def test_no_line_can_be_left_out(trace, event):
    """A trace that lacks one line of a prefetch is rejected."""
    events = lines(trace)
    begin = next(n for n, line in enumerate(events) if line["event"] == "PREFETCH")
    del events[next(n for n in range(begin, len(events)) if events[n]["event"] == event)]
    with pytest.raises(TraceError):
        check_trace(seal(trace, events))


def test_a_request_that_never_arrives(trace):
    """A trace may end after a prefetch and before the arrival of its request."""
    events = lines(trace)
    end = next(
        n for n, line in enumerate(events) if line["event"] == "REQUEST" and "hints" in line
    )
    report = check_trace(seal(trace, [*events[:end], events[-1]]))
    assert (report.finished, report.pool["private"]) == (2, 0)


def test_explain_says_that_it_was_hit(trace):
    """`explain` counts prefetched blocks as hits of their request."""
    again = explain(trace).requests["again"]
    assert (again.hit, again.losses[0].first) == (16, 16)


class Greedy(FCFS):
    """A scheduler that pauses and admits every loading job in each step."""

    name = "greedy"

    def plan(self, state):
        """Return a plan that pauses all loading jobs, and admits them and all waiting ones."""
        loading = [job for job in state.running if job.stage == LOADING]
        self.named = max(getattr(self, "named", 0), len(loading))
        return StepPlan([*loading, *state.waiting], loading)


def test_a_plan_may_name_jobs_that_load():
    """Loading jobs in a plan are neither paused nor admitted twice."""
    requests = [*session(None), ask("more", 101_750, 8, 3)]
    scheduler = Greedy()
    run = serve_slowly(requests, blocks=12, scheduler=scheduler)
    assert (len(run.rows), scheduler.named) == (4, 1)
