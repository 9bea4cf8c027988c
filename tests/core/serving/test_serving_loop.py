"""The serving loop step by step: a step takes 10 ns, a block holds 4 tokens."""

from copy import copy

import attrs
import pytest
from helpers.schedulers import scheduler_of
from helpers.serving import Bent, Even, ask, serve
from helpers.traces import lines, seal

from kvcore import InputError, KVCache, LatencyModel, Request
from kvcore.errors import TraceError
from kvcore.serving import simulate
from kvcore.serving.stats import PENDING_EVENTS
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import TokenRate
from kvcore_replay.check.trace import replay as check_trace


def test_a_request_from_arrival_to_finish():
    """A request has a prefill step with the first token, then a decode step for each token.

    At its end all blocks are free.
    """
    run = serve([ask("a", 3, prompt=7, output=4, keys=[1, 2])])
    assert run.timeline() == [
        "3 REQUEST a",
        "3 MISS a",
        "3 ALLOC a",
        "13 COMMIT a",
        "13 FIRST_TOKEN a",
        # Two blocks hold 8 tokens; the step that begins here writes the ninth.
        "23 ALLOC a",
        "43 FINISH a",
        "43 FREE a",
    ]


def test_the_order_at_the_end_of_a_step():
    """A step ends with arrivals, commits, first tokens, completions and then the next plan.

    Completions are in the order of admission.
    """
    requests = [
        ask("a", output=2, keys=[1]),
        ask("b", 5, keys=[2]),
        ask("c", 5, keys=[3], output=2),
        ask("d", 20, keys=[4]),
    ]
    run = serve(requests, max_seqs=3)
    assert [line for line in run.timeline() if line.startswith("20 ")] == [
        "20 REQUEST d",
        "20 COMMIT b",
        "20 COMMIT c",
        "20 FIRST_TOKEN b",
        "20 FIRST_TOKEN c",
        "20 FINISH a",
        "20 FREE a",
        "20 FINISH b",
        "20 FREE b",
        "20 ALLOC c",
        "20 MISS d",
        "20 ALLOC d",
    ]


def test_a_request_that_arrives_during_a_step_is_recorded_at_its_arrival():
    """A request that arrives during a step is recorded at its arrival, and planned later."""
    run = serve([ask("a", output=9), ask("b", 33)])
    assert [line for line in run.timeline() if line.endswith(" b")][:2] == [
        "33 REQUEST b",
        "40 MISS b",
    ]


def test_the_clock_counts_picoseconds():
    """Steps of 2.5 ns add up exactly; recorded times are whole nanoseconds, rounded down."""
    run = serve([ask("a", prompt=1, output=8)], latency=TokenRate(prefill=4e5, decode=4e5))
    assert run.rows["a"]["first_token"] == 2
    assert run.rows["a"]["finish"] == 20
    assert run.result.log.busy_ps == 20_000


def test_a_request_that_can_never_fit_is_rejected():
    """A request that can never fit is rejected at its arrival with the reason.

    Other requests are served.
    """
    requests = [
        ask("empty", prompt=0),
        ask("huge", prompt=21),
        ask("grows", prompt=20, output=2),
        ask("fits", prompt=20),
        ask("grows just so", 1, prompt=17, output=4),
    ]
    run = serve(requests, blocks=5)
    assert run.rejected == {
        "empty": "its prompt is empty",
        "huge": "it needs 6 blocks; the pool has 5",
        "grows": "it needs 6 blocks; the pool has 5",
    }
    assert run.timeline("REJECT") == ["0 REJECT empty", "0 REJECT huge", "0 REJECT grows"]
    assert list(run.rows) == ["fits", "grows just so"]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["fcfs", "srpt", "slo", "fair", "lpm", "priority"])
def test_simultaneous_requests_are_all_served(scheduler):
    """10,000 simultaneous requests are all served, by `fcfs` in their order."""
    requests = [
        ask(index, at=7, prompt=1 + index % 50, output=index % 20, tenant=index % 7 * "x")
        for index in range(10_000)
    ]
    options = {"blocks": 400, "max_seqs": 64, "trace": False}
    run = serve(requests, scheduler=scheduler_of(scheduler), **options)
    assert len(run.rows) == 10_000
    if scheduler == "fcfs":
        admitted = [run.rows[index]["admitted"] for index in range(10_000)]
        assert admitted == sorted(admitted)


def test_a_context_counts_up_to_the_size_of_each_attention_window():
    """A context counts in each attention window up to the size of the window."""
    asked = []

    @attrs.define(slots=False, eq=False)
    class Recording(Bent):
        """A latency model that records the work of each step."""

        def pieces(self, work):
            """Record the work."""
            asked.append(copy(work))
            return super().pieces(work)

    latency = Recording(reach=(None, 4))
    serve([ask("a", prompt=3, output=4)], latency=latency, jumps=False)
    assert [work.attended_pairs for work in asked] == [(6, 6), (0, 0), (0, 0), (0, 0)]
    assert [work.context for work in asked] == [(0, 0), (4, 4), (5, 4), (6, 4)]


def test_a_cache_with_keys_accounting_is_refused():
    """A cache with `keys` accounting is refused under a clock."""
    cache = KVCache(9, 4, eviction=LRU(), accounting="keys", key_tokens=4)
    with pytest.raises(InputError, match="'keys' accounting: under a clock tokens count"):
        simulate([], cache=cache, latency=Even())


def test_a_cache_that_has_served_is_refused():
    """A cache that has served a run is refused by another one."""
    cache = KVCache(9, 4, eviction=LRU(), accounting="tokens", key_tokens=4)
    simulate([ask("a")], cache=cache, latency=Even())
    with pytest.raises(InputError, match="served before: make a new KVCache for each run"):
        simulate([ask("a")], cache=cache, latency=Even())


def test_keys_of_another_length_are_refused():
    """A request whose keys cover another number of tokens raises InputError that names it."""
    odd = Request(id="odd", prompt_tokens=6, output_tokens=1, keys=[1, 2], key_tokens=3)
    with pytest.raises(InputError, match="request odd has keys of 3 tokens; this cache was"):
        serve([odd])


def test_what_is_not_added_up_yet_is_bounded():
    """Events of the pool and times between tokens are added up some hundred at a time."""
    requests = [ask(index, 40 * index, 1, 2) for index in range(2 * PENDING_EVENTS)]
    log = serve(requests, max_seqs=3, jumps=False, trace=False).result.log
    assert max(len(log.pool.pending), len(log.itl.pending)) <= PENDING_EVENTS
    assert log.itl.count == len(requests)


@attrs.define(slots=False, eq=False)
class Pairs(Even):
    """A latency model of a picosecond for each (query, key) pair of prompts."""

    def pieces(self, work):
        """Return one flat piece."""
        return [(sum(work.attended_pairs), 0)]


def test_a_chunk_attends_to_what_is_left_of_the_prompt():
    """A chunk of a prompt attends to itself and to the tokens that were not dropped."""
    busy = []
    for retention in (None, "window:tokens=4"):
        run = serve(
            [ask("a", 0, 12, 1)], retention=retention, latency=Pairs(), max_tokens=4, max_seqs=1
        )
        busy.append(run.result.log.busy_ps)
    assert busy == [10 + 26 + 42, 10 + 26 + 26]


def test_a_latency_model_of_seconds_alone_is_asked_for_each_step():
    """Steps are jumped over only where lines say how long each takes."""

    class Easy(LatencyModel):
        """A model of the easy tier."""

        name = "easy"

        def seconds(self, work):
            """Return a second."""
            del work
            return 1.0

    class Both(Easy):
        """A model with lines and seconds."""

        name = "both"
        seconds = Easy.seconds
        jumps = True

        def pieces(self, work):
            """Return a flat line."""
            del work
            return [(10**12, 0)]

    assert (LatencyModel.jumps, Easy.jumps, Both.jumps, Even.jumps) == (True, False, True, True)


def test_without_free_blocks_the_last_job_in_order_is_preempted():
    """Without free blocks the last job in order is preempted and frees its blocks.

    Later its prompt and its generated tokens are one prefill.
    """
    keys = {"a": [1, 2, 3], "b": [4, 5, 6]}
    requests = [ask(name, ord(name) - 97, 12, 14, keys=keys[name]) for name in keys]
    run = serve(requests, blocks=8)
    # b has 4 tokens when each needs a fifth block at 50; it prefills 12 + 4 tokens at 140.
    assert run.timeline("FIRST_TOKEN", "PREEMPT", "FINISH") == [
        "10 FIRST_TOKEN a",
        "20 FIRST_TOKEN b",
        "50 PREEMPT b",
        "140 FINISH a",
        "240 FINISH b",
    ]
    assert [line["how"] for line in run.lines if line["event"] == "PREEMPT"] == ["recompute"]
    assert (run.result.cache.stats.self_hit_blocks, run.sum("hit")) == (1, 0)


@pytest.mark.parametrize(("named", "found"), [((), 2), ((5, 6, 7), 4)])
def test_a_preempted_request_hits_its_blocks_that_are_left(named, found, tmp_path):
    """A preempted request hits the blocks of its prompt, and those of its output with keys.

    b has five full blocks when each needs a sixth; the last of them is evicted for a.
    """
    requests = [
        ask("a", 0, 8, 14, keys=[1, 2]),
        ask("b", 0, 8, 14, keys=[3, 4], output_keys=named),
    ]
    run = serve(requests, blocks=10)
    assert {name: row["recomputes"] for name, row in run.rows.items()} == {"a": 0, "b": 1}
    assert run.result.cache.stats.self_hit_blocks == found
    path = tmp_path / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).hit["self_hit_blocks"] == found
    # A HIT line with one block less than was cached is rejected.
    events = lines(path)
    again = next(line for line in events if line["event"] == "HIT" and line.get("again"))
    again["blocks"] -= 1
    seal(path, events)
    with pytest.raises(TraceError, match=f"{found - 1} blocks hit; {found} are cached"):
        check_trace(path)
