"""Estimates of schedulers: the remaining time of a job, and its latest start."""

from __future__ import annotations

from math import log
from statistics import mean, stdev

import pytest

from kvcore import SLO, Job, Request
from kvcore.serving import DecodeSteps
from kvcore.serving.job import DECODE, PREFILL
from kvcore.testing import STEP, ToyServer
from kvcore_plugins.scheduler import SJF, SRPT, LeastSlack

SECOND = 10**9

CHUNK = 16
"""Tokens of a prompt that the toy server computes in one step."""


def make(scheduler, **fields):
    """Return `scheduler`, bound to a toy server, and a job that has just arrived."""
    ToyServer(scheduler)
    fields = {"id": 1, "prompt_tokens": 4 * CHUNK, "output_tokens": 10} | fields
    request = Request(key_tokens=16, **fields)
    return scheduler, Job(
        request, 1, request.arrival, DecodeSteps(), request.prompt_tokens, request.slo
    )


def progress(job, computed, generated=0):
    """Return `job`, running with `computed` tokens of its prompt and `generated` ones."""
    job.computed, job.stage = computed, DECODE if generated else PREFILL
    if generated:
        job.generated_before = generated
    return job


def test_completed_work_reduces_the_remaining_time():
    """Computed and hit tokens, and generated ones, reduce the remaining time."""
    scheduler, job = make(SRPT())
    assert scheduler.remaining_ns(progress(job, 2 * CHUNK)) == (2 + 9) * STEP
    assert scheduler.remaining_ns(progress(job, 4 * CHUNK, 1)) == 9 * STEP
    assert scheduler.remaining_ns(progress(job, 4 * CHUNK, 9)) == STEP
    assert scheduler.total_ns(job) == 13 * STEP


def test_tokens_to_recompute_count_as_prefill_again():
    """After a preemption, the prompt and the generated tokens count as prefill again."""
    scheduler, job = make(SRPT())
    progress(job, 4 * CHUNK, 8)
    job.target, job.computed = job.request.prompt_tokens + 8, 0
    assert scheduler.remaining_ns(job) == (5 + 1) * STEP


def test_decode_times_are_those_of_a_batch():
    """Decode times are those of a batch of `concurrency` sequences of the job's length."""
    asked = []
    scheduler, job = make(SRPT(concurrency=7))
    scheduler.server.decode_ns = lambda *arguments: asked.append(arguments) or 0
    scheduler.remaining_ns(job)
    scheduler.remaining_ns(progress(job, 64, 4))
    scheduler.total_ns(job)
    assert asked == [(9, 64, 7), (6, 64 + 3, 7), (9, 64, 7)]


@pytest.mark.parametrize("output", [1, 10, 40])
def test_remaining_time_never_rises(output):
    """The remaining time never rises, even if the predicted ten tokens were wrong."""
    scheduler, job = make(SJF(), output_tokens=output, predicted_output_tokens=10)
    scheduler.server.decode_ns = lambda tokens, context, _: sum(
        range(context, context + tokens)
    )
    times = [scheduler.remaining_ns(progress(job, 16 * part)) for part in range(4)]
    times += [scheduler.remaining_ns(progress(job, 64, done)) for done in range(1, output)]
    assert times == sorted(times, reverse=True)


def test_predictions_come_from_the_workload_first():
    """Predictions of the workload precede the error model, and are at least one token."""
    for predicted in (1, 77):
        scheduler, job = make(SJF(error=5), predicted_output_tokens=predicted)
        assert scheduler.expected(job) == predicted
    scheduler, job = make(SJF(), predicted_output_tokens=0)
    assert scheduler.expected(job) == 1


def test_a_text_that_ends_at_the_longest_sequence_is_no_longer():
    """True and predicted lengths end where the server takes no more tokens."""
    for kind in ("true", "predicted"):
        scheduler, job = make(
            SRPT(length=kind), output_tokens=5000, predicted_output_tokens=4000
        )
        job.output_tokens = 7
        assert scheduler.expected(job) == 7


def expected(scheduler, ids=range(1000), output=10**6):
    """Return the length that `scheduler` expects of each request, by id; all are equal."""
    return {
        name: scheduler.expected(make(SJF(), id=name, output_tokens=output)[1]) for name in ids
    }


def test_errors_are_lognormal():
    """The logarithms of errors have the mean 0 and the given standard deviation."""
    errors = [log(tokens / 10**6) for tokens in expected(SJF(error=0.5)).values()]
    assert abs(mean(errors)) < 4 * 0.5 / 1000**0.5
    assert abs(stdev(errors) - 0.5) < 4 * 0.5 / 2000**0.5


def test_errors_depend_on_seed_and_request_alone():
    """Errors depend on seed, scheduler and request, and not on the order of calls."""
    forwards = expected(SJF(error=1), range(20))
    assert forwards == expected(SJF(error=1), reversed(range(20)))
    assert forwards != expected(SJF(error=1, seed=1), range(20))
    assert forwards != expected(SRPT(error=1, length="predicted"), range(20))


def test_latest_start_by_ttft():
    """Before the first token, the latest start is that of the TTFT less the prefill."""
    scheduler, job = make(LeastSlack(), arrival=5, slo=SLO(ttft_ns=SECOND, tpot_ns=1))
    assert scheduler.latest_start(job) == 5 + SECOND - 4 * STEP


def test_latest_start_by_tpot():
    """After the first token, each of the nine others adds its TPOT to the deadline."""
    scheduler, job = make(LeastSlack(), slo=SLO(ttft_ns=1, tpot_ns=3 * STEP))
    job.first_token = SECOND
    progress(job, 64, 4)
    assert scheduler.latest_start(job) == SECOND + 9 * 3 * STEP - 6 * STEP


def test_ttft_and_tpot_options_replace_missing_slos():
    """The options `ttft` and `tpot` replace those missing in a request without a deadline."""
    scheduler, job = make(LeastSlack(ttft=2, tpot=0.5), slo=SLO(tpot_ns=7))
    assert scheduler.latest_start(job) == 2 * SECOND - 4 * STEP
    scheduler, job = make(LeastSlack(ttft=2, tpot=0.5))
    job.first_token = SECOND
    progress(job, 64, 1)
    assert scheduler.latest_start(job) == SECOND + 9 * SECOND // 2 - 9 * STEP
    scheduler, job = make(LeastSlack(ttft=0.001), slo=SLO(deadline_ns=SECOND))
    assert scheduler.latest_start(job) == SECOND - 13 * STEP


def test_the_earlier_of_two_latest_starts_decides():
    """Of a TTFT and a deadline, the one with the earlier start decides."""
    for ttft, start in ((SECOND, SECOND - 4 * STEP), (9 * SECOND, 5 * SECOND - 13 * STEP)):
        scheduler, job = make(LeastSlack(), slo=SLO(ttft_ns=ttft, deadline_ns=5 * SECOND))
        assert scheduler.latest_start(job) == start


def test_a_job_becomes_hopeless_just_after_its_latest_start():
    """The priority changes once, 1 ns after the latest start, and `changes_at` returns that."""
    scheduler, job = make(LeastSlack(), slo=SLO(deadline_ns=SECOND))
    start = scheduler.latest_start(job)
    assert scheduler.changes_at(job, start) == start + 1
    assert scheduler.changes_at(job, start + 1) is None
    assert scheduler.priority(job, start) == (False, start)
    assert scheduler.priority(job, start + 1) == (True, start)


def test_a_running_job_keeps_its_rank_with_preemption():
    """A running job keeps its rank with preemption, and is ranked again without it."""
    for preemptive in (True, False):
        scheduler, job = make(LeastSlack(preemptive=preemptive), slo=SLO(deadline_ns=SECOND))
        job.rank = scheduler.priority(job, 0)
        progress(job, 64, 5)
        assert (scheduler.priority(job, 0) == job.rank) is preemptive
