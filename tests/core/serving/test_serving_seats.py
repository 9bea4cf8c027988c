"""Admission, waiting and preemption: steps of 10 ns, blocks of 4 tokens."""

import pytest
from helpers.schedulers import Latest, Urgent, scheduler_of
from helpers.serving import ask, serve
from helpers.traces import lines, seal

from kvcore.errors import TraceError
from kvcore_replay.check.trace import replay as check_trace

PREEMPTION = ("PREEMPT", "RESUME")


def kinds(run):
    """Return (pauses, recomputes) of each request."""
    return {name: (row["pauses"], row["recomputes"]) for name, row in run.rows.items()}


def finish(run):
    """Return the time at which each request finished."""
    return {name: row["finish"] for name, row in run.rows.items()}


def test_a_request_beyond_max_seqs_waits_for_a_slot():
    """A request beyond `max_seqs` waits for a slot, even if there are enough blocks."""
    run = serve([ask("a", output=3), ask("b", output=2), ask("c")], max_seqs=2)
    assert [row["admitted"] for row in run.rows.values()] == [0, 0, 20]
    assert run.timeline("FINISH") == ["20 FINISH b", "30 FINISH a", "30 FINISH c"]


def test_the_watermark_keeps_blocks_for_running_requests():
    """A request that would use blocks of the watermark waits for the first to end."""
    requests = [ask("a", prompt=16, output=9), ask("b", 1, prompt=8, output=2)]
    assert finish(serve(requests, blocks=8)) == {"a": 90, "b": 30}
    assert finish(serve(requests, blocks=8, watermark=0.25)) == {"a": 90, "b": 110}


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
    assert kinds(run) == {"a": (0, 0), "b": (0, 1)}
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


def test_the_job_admitted_last_of_equal_ones_is_preempted():
    """Of jobs with equal priority the one admitted last is preempted.

    Here a and b are equal, and c is more urgent.
    """
    requests = [ask(name, 0, 8, 20, priority=int(name != "c")) for name in "abc"]
    run = serve(requests, blocks=8, scheduler=Urgent())
    assert run.timeline("PREEMPT")[:2] == ["10 PREEMPT b", "90 PREEMPT a"]
    assert kinds(run)["c"] == (0, 0)


def test_a_preempted_request_is_admitted_before_later_ones():
    """Under `fcfs` a preempted request is admitted before later ones."""
    requests = [ask(name, 0, 12, 14) for name in "ab"] + [ask("c", 60, 12)]
    run = serve(requests, blocks=8)
    assert run.timeline("PREEMPT") == ["50 PREEMPT b"]
    order = [line["request"] for line in run.lines if line["event"] == "MISS"]
    assert order == ["a", "b", "b", "c"]


def test_a_pause_keeps_the_blocks():
    """A job paused for a shorter one keeps its blocks, and resumes where it was."""
    requests = [ask("a", 0, 8, 20), ask("b", 35, 8, 3)]
    run = serve(requests, blocks=8, scheduler=scheduler_of("srpt"), max_seqs=1)
    assert run.timeline(*PREEMPTION) == ["40 PREEMPT a", "70 RESUME a"]
    assert finish(run) == {"b": 70, "a": 230}
    assert run.rows["a"]["pauses"] == 1


def test_a_pause_in_mid_prefill():
    """A job paused within its prefill resumes with the rest of its prompt."""
    requests = [ask("a", 0, 40, 2, priority=1), ask("b", 15, 4, 2)]
    run = serve(requests, scheduler=Urgent(), max_seqs=1, max_tokens=4)
    assert run.timeline(*PREEMPTION) == ["20 PREEMPT a", "40 RESUME a"]
    assert finish(run) == {"b": 40, "a": 20 + 20 + 80 + 10}


def test_a_step_without_a_token_left_admits_no_job():
    """A job that goes before one that runs waits while a step has no token for either.

    The prompt of a takes all tokens of the step at 20 ns; c has its first chunk since 0.
    """
    requests = [
        ask("c", 0, 40, priority=2),
        ask("a", 5, 16, priority=0),
        ask("b", 15, priority=1),
    ]
    run = serve(requests, scheduler=Urgent(), max_tokens=8, max_seqs=3)
    assert [run.rows[name]["admitted"] for name in "cab"] == [0, 10, 30]


def test_a_job_is_not_paused_for_one_that_finds_no_blocks():
    """A job is not paused for a more urgent one that would find no blocks."""
    requests = [ask("a", 0, 16, 17, priority=1), ask("b", 35, 16, 13)]
    run = serve(requests, blocks=8, scheduler=Urgent(), max_seqs=1)
    hows = [(line["t"], line["how"]) for line in run.lines if line["event"] == "PREEMPT"]
    assert hows == []
    assert finish(run) == {"a": 170, "b": 300}


def test_no_job_is_preempted_for_an_admission():
    """No job is preempted for the blocks of a more urgent one, which waits."""
    requests = [ask("a", 0, 16, 9, priority=1), ask("b", 35, 24, 3)]
    run = serve(requests, blocks=8, scheduler=Urgent())
    assert kinds(run) == {"a": (0, 0), "b": (0, 0)}
    assert finish(run) == {"a": 90, "b": 120}


def test_a_scheduler_without_preemption_pauses_no_job():
    """Without preemption, the shortest job waits for a slot."""
    scheduler = scheduler_of("srpt:preemptive=false")
    run = serve([ask("a", 0, 8, 90), ask("b", 5)], scheduler=scheduler, max_seqs=1)
    assert finish(run) == {"a": 900, "b": 910}


def test_a_latest_first_scheduler_finishes_in_reverse_order():
    """Under a latest-first scheduler each arrival pauses the job before it.

    So jobs finish in the reverse order.
    """
    requests = [ask(index, 20 * index, output=9) for index in range(4)]
    run = serve(requests, scheduler=Latest(), max_seqs=1)
    assert list(run.rows) == [3, 2, 1, 0]
    assert kinds(run) == {3: (0, 0), 2: (1, 0), 1: (1, 0), 0: (1, 0)}


def test_a_priority_that_changes_in_time_reorders_the_queue():
    """A priority that changes at a given time reorders the queue without another event."""
    requests = [
        ask("a", output=60),
        ask("b", 1, output=30),
        ask("c", 250),
        ask("d", 350, output=40),
    ]
    run = serve(requests, scheduler=scheduler_of("impatient"), max_seqs=1)
    assert list(run.rows) == ["a", "d", "c", "b"]


def test_a_preempted_job_is_not_admitted_again_in_the_same_step():
    """A preempted job is not admitted again in its step, though its first chunk would fit."""
    requests = [ask("a", 0, 8, 12), ask("b", 0, 8, 12)]
    run = serve(requests, blocks=6, reserve="first-chunk", max_chunk=4)
    lines = run.timeline("MISS", "PREEMPT")
    assert lines == ["0 MISS a", "0 MISS b", "60 PREEMPT b", "130 MISS b"]


def test_a_job_without_its_blocks_gives_back_its_own_tokens_alone():
    """A job that finds no block for its chunk leaves the rest of the step to others.

    At 40 ns b has 5 of 8 tokens, and a loses its blocks: 3 are left, which c gets.
    """
    requests = [ask("a", 0, 40, priority=2), ask("b", 0, 40, priority=1), ask("c", 35)]
    options = {"max_tokens": 8, "max_seqs": 2, "max_chunk": 5, "reserve": "first-chunk"}
    run = serve(requests, blocks=10, scheduler=Urgent(preemptive=False), **options)
    preempted, *admitted = run.timeline("PREEMPT", "MISS")[2:5]
    assert (preempted, admitted) == ("40 PREEMPT a", ["40 MISS c", "60 MISS a"])


@pytest.mark.parametrize("steps", ["mixed", "prefill-first"])
def test_two_requests_of_the_whole_pool_are_served_in_turn(steps):
    """Two requests that each need the whole pool are served one after the other."""
    requests = [ask("a", 0, 16, 17), ask("b", 0, 16, 17)]
    run = serve(requests, blocks=8, steps=steps)
    assert finish(run) == {"a": 170, "b": 330}
    assert kinds(run) == {"a": (0, 0), "b": (0, 1)}
    assert run.timeline("PREEMPT") == ["10 PREEMPT b"]
