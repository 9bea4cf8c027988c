"""The check of requests in a trace: admissions, pauses, preemptions and ends."""

from contextlib import contextmanager

import pytest
from helpers.traces import ask, lines, seal, serve

from kvcore import KVCache, Trace, TraceError
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.check.trace import check_trace


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace of 34 lines in which requests wait, pause, end and fail."""
    return serve(tmp_path / "trace.jsonl")


def error_of(path):
    """Return the error of the check, without the path: it begins with the line."""
    with pytest.raises(TraceError) as caught:
        check_trace(path)
    return str(caught.value).removeprefix(f"{path}:")


def forged(trace, n, event, **fields):
    """Put a line before line `n` of a trace, at its time, and seal it."""
    events = lines(trace)
    line = {"n": n, "t": events[n]["t"], "event": event, **fields}
    return seal(trace, [*events[:n], line, *events[n:]])


def test_the_report_of_a_moment_counts_the_ends_up_to_it(trace):
    """The report of a moment counts the ends and preemptions up to it."""
    report = check_trace(trace, 3)
    assert (report.requests, report.finished, report.rejected) == (3, 1, 1)
    assert report.preemptions == {"pause": 1, "recompute": 0, "swap": 0}


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (3, {"request": "nobody"}, "4: REJECT: request 'nobody' has no REQUEST line before"),
        (3, {"request": "long"}, "4: REJECT: request 'long' needs 5 blocks, and the pool has"),
        (7, {"seq": 2}, "8: FIRST_TOKEN: no sequence 2 is open"),
        (7, {"request": "huge"}, "8: FIRST_TOKEN: request 'huge' is rejected: nothing of it"),
        (15, {"seq": 1}, "16: FIRST_TOKEN: sequence 1 is not of request 'short'"),
        (15, {"request": "long", "seq": 1}, "16: FIRST_TOKEN: request 'long' is paused, not"),
        (9, {"for": "nobody"}, "10: PREEMPT: request 'nobody' has no REQUEST line before"),
        (20, {"for": "long"}, "21: PREEMPT: request 'long' does not wait for what it preempts"),
        (9, {"how": "recompute"}, "11: SPLIT: FREE of sequence 1 must come before this"),
        (20, {"how": "pause"}, "22: FREE: sequence 1 closes without FINISH or PREEMPT"),
        (16, {"output": 2}, "17: FINISH: request 'short' asks for 1 tokens, and gets 2"),
        (16, {"request": "long", "seq": 1}, "17: FINISH: request 'long' is paused, not"),
        (21, {"reason": "rollback"}, "22: FREE: sequence 1 has no blocks to free with reason"),
        (1, {"output": 0}, "8: FIRST_TOKEN: request 'long' asks for no output"),
        (22, {"output": 3}, "27: FINISH: request 'silent' asks for 3 tokens, and gets 0"),
    ],
)
def test_an_impossible_line_is_refused(trace, n, fields, reason):
    """A changed line raises TraceError with the line, the event and the reason.

    The changes keep the file well-formed.
    """
    events = lines(trace)
    events[n] |= fields
    assert error_of(seal(trace, events)).startswith(reason)


LONG, SHORT = {"request": "long", "seq": 1}, {"request": "short", "seq": 2}
PAUSE = {"how": "pause"}
REJECTED = "request 'huge' is rejected: nothing of it follows"
IDLE = "sequence 1 is paused: it gets no blocks and commits none"


@pytest.mark.parametrize(
    ("n", "event", "fields", "reason"),
    [
        (8, "FIRST_TOKEN", LONG, "request 'long' has its first token already"),
        (10, "PREEMPT", LONG | PAUSE, "request 'long' is paused, not running"),
        (10, "ALLOC", {"seq": 1, "first": 3, "runs": [[3, 1]]}, IDLE),
        (8, "RESUME", LONG, "request 'long' is running, not paused"),
        (22, "RESUME", LONG, "no sequence 1 is open"),
        (
            *(7, "FINISH", LONG | {"output": 6}),
            "request 'long' gets 6 tokens; its first did not come",
        ),
        (
            *(8, "REJECT", {"request": "long", "why": "whim"}),
            "request 'long' was admitted, as sequence 1",
        ),
        (8, "REJECT", {"request": "huge", "why": "twice"}, REJECTED),
        (22, "PREEMPT", SHORT | PAUSE, "no sequence 2 is open"),
        (13, "PREEMPT", SHORT | PAUSE | {"for": "huge"}, REJECTED),
    ],
)
def test_a_line_at_the_wrong_time_is_refused(trace, n, event, fields, reason):
    """A line that does not fit the state of its request raises TraceError with the reason."""
    assert error_of(forged(trace, n, event, **fields)) == f"{n + 1}: {event}: {reason}"


@contextmanager
def serving(path, mode="model"):
    """Record the calls of the body with a trace and a cache of 8 blocks."""
    with Trace(path, mode=mode) as trace:
        yield trace, KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace)


def finish(trace, cache, seq, output=0):
    """Finish the request of a sequence and close the sequence."""
    trace.finish(cache.now, request=seq.request.id, seq=seq.id, output=output)
    cache.close(seq)


def test_a_finished_request_cannot_be_admitted_again(tmp_path):
    """A finished request cannot be admitted again, with a clock or without."""
    path = tmp_path / "trace.jsonl"
    for mode in ("untimed", "model"):
        with serving(path, mode) as (trace, cache):
            finish(trace, cache, cache.open(ask("r", "a")))
            cache.open(ask("r", "a"), resumed=True)
        assert error_of(path) == "7: MISS: request 'r' is finished: nothing of it follows"


def test_a_second_admission_needs_a_recompute(tmp_path):
    """With a clock a request is admitted again only after a PREEMPT by recompute."""
    path = tmp_path / "trace.jsonl"
    with serving(path) as (_, cache):
        cache.open(ask("r", "a"))
        cache.open(ask("r", "a"), resumed=True)
    assert error_of(path) == "5: MISS: request 'r' is running, and is admitted"


def test_an_untimed_trace_needs_no_reason_for_a_second_admission(tmp_path):
    """In an untimed trace a sequence may close and be admitted again without a reason."""
    path = tmp_path / "trace.jsonl"
    with serving(path, "untimed") as (_, cache):
        cache.close(cache.open(ask("r", "a")))
        cache.open(ask("r", "a"), resumed=True)
    assert check_trace(path).finished == 0


@pytest.mark.parametrize(("cut", "stage"), [(4, "waiting"), (8, "running"), (22, "preempted")])
def test_every_request_must_finish_or_be_rejected(trace, cut, stage):
    """A trace with a clock needs a FINISH or REJECT for every request."""
    reason = f"END: requests without FINISH or REJECT: 1; the first, 'long', is {stage}"
    assert error_of(seal(trace, lines(trace)[:cut])) == f"{cut + 1}: {reason}"


def test_every_sequence_must_be_closed(tmp_path):
    """A trace with a clock has no open sequence at its end, forks included."""
    path = tmp_path / "trace.jsonl"
    with serving(path) as (trace, cache):
        seq = cache.open(ask("r", "a"))
        cache.fork(seq)
        finish(trace, cache, seq)
    assert error_of(path) == "8: END: sequences that are not closed: 1"


def test_a_model_may_stop_early_under_the_wall_clock(tmp_path):
    """Under the wall clock a request may finish with fewer tokens than requested."""
    path = tmp_path / "trace.jsonl"
    with serving(path, "wall") as (trace, cache):
        seq = cache.open(ask("r", "a", output_tokens=5))
        trace.first_token(0, request="r", seq=1)
        cache.extend(seq, 2, 0)
        finish(trace, cache, seq, 3)
        finish(trace, cache, cache.open(ask("silent", "a", output_tokens=5)))
    assert check_trace(path).finished == 2


def test_a_served_request_has_blocks_for_its_tokens(trace):
    """FIRST_TOKEN needs blocks for the prompt, FINISH for all tokens before the last."""
    events = lines(trace)
    events[1]["prompt"] = 13
    assert error_of(seal(trace, events)).startswith(
        "8: FIRST_TOKEN: sequence 1 has had 3 blocks; its prompt and 1 tokens of output take 4"
    )
    events[1] |= {"prompt": 12, "output": 10}
    (at,) = (n for n, event in enumerate(events) if event.get("output") == 6 and n > 1)
    events[at]["output"] = 10
    assert error_of(seal(trace, events)).startswith(
        f"{at + 1}: FINISH: sequence 4 has had 5 blocks; its prompt and 10 tokens of output"
    )


def test_a_reject_of_a_request_that_fits_is_refused(trace):
    """A REJECT of a request that fits into the pool is refused."""
    events = lines(trace)
    events[2]["prompt"] = 32
    reason = "4: REJECT: request 'huge' needs 8 blocks, and the pool has enough"
    assert error_of(seal(trace, events)) == reason


def test_only_running_requests_generate_blocks(trace):
    """KEYS of generated blocks are refused for a request that does not run."""
    asked = {"request": "long", "keys": [7]}
    assert error_of(forged(trace, 4, "KEYS", **asked)) == (
        "5: KEYS: request 'long' is waiting, and generates nothing"
    )


def test_a_commit_of_a_paused_sequence_is_refused(trace):
    """A COMMIT of a paused sequence is refused."""
    events = lines(trace)
    at = next(n for n, event in enumerate(events) if event["event"] == "COMMIT")
    pause = {"n": 0, "t": 1, "event": "PREEMPT"} | LONG | PAUSE
    assert error_of(seal(trace, [*events[:at], pause, *events[at:]])) == (
        f"{at + 2}: COMMIT: {IDLE}"
    )
