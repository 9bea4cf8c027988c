"""The order of each built-in scheduler on constructed traffic."""

from __future__ import annotations

import pytest
from helpers.jobs import ask, job, serve

from kvcore import SLO, InputError, Plugins
from kvcore.serving import LoopState
from kvcore.testing import STEP, ToyServer
from kvcore_plugins.scheduler import FCFS, LPM, SJF, SRPT, Fair, LeastSlack, Priority

SECOND = 10**9

LATER = {"slo": SLO(deadline_ns=SECOND)}
SOONER = {"slo": SLO(deadline_ns=SECOND // 2)}

CONSTRUCTED = {
    "fair": (Fair, [ask("a", tenant="x"), ask("b", tenant="x"), ask("c", tenant="y")], "acb"),
    "lpm": (LPM, [ask("a", keys="pq"), ask("b", keys="rs"), ask("c", keys="pq")], "acb"),
    "priority": (Priority, [ask("a", priority=2), ask("b"), ask("c", priority=1)], "acb"),
    "sjf": (SJF, [ask("a", output=2), ask("b", output=9), ask("c", output=3)], "acb"),
    "slo": (LeastSlack, [ask("a", **SOONER), ask("b", **LATER), ask("c", **SOONER)], "acb"),
    "srpt": (SRPT, [ask("a", output=9), ask("b", at=2, output=3)], "aba"),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_a_scheduler_differs_from_fcfs(name):
    """On constructed traffic each scheduler serves in its own order, and `fcfs` by arrival."""
    scheduler, requests, order = CONSTRUCTED[name]
    assert serve(scheduler(), requests) == order
    assert serve(FCFS(), requests) == "".join(request.id for request in requests)


def test_every_scheduler_has_constructed_traffic():
    """Every built-in scheduler except `fcfs` has constructed traffic."""
    assert {*CONSTRUCTED, "fcfs"} == set(Plugins().names("scheduler"))


def test_srpt_runs_the_job_closest_to_its_end_first():
    """The job closest to its end runs first, and a paused job resumes where it was."""
    requests = [ask("a", output=9), ask("b", at=2, output=3), ask("c", at=3, output=1)]
    assert serve(SRPT(), requests, what="finished") == "cba"


def test_srpt_without_preemption_waits():
    """Without preemption running jobs go on, and waiting ones are ordered by length."""
    requests = [ask("a", output=9), ask("b", at=2, output=5), ask("c", at=3, output=3)]
    assert serve(SRPT(preemptive=False), requests) == "acb"


def test_sjf_orders_by_predicted_lengths():
    """`sjf` orders by predicted lengths by default, and by true ones with `length=true`."""
    requests = [
        ask("a"),
        ask("b", output=9, predicted_output_tokens=2),
        ask("c", output=3, predicted_output_tokens=5),
    ]
    assert serve(SJF(), requests) == "abc"
    assert serve(SJF(length="true"), requests) == "acb"


def test_slo_serves_a_hopeless_job_last():
    """A job that cannot meet its SLO any more does not delay one that can."""
    b = ask("b", at=1, output=9, slo=SLO(deadline_ns=12 * STEP))
    c = ask("c", at=1, output=9, slo=SLO(deadline_ns=15 * STEP))
    # To be in time, b must begin by step 4 and c by step 7. The slot is free at 4, or at 5.
    assert serve(LeastSlack(), [ask("a", output=4), b, c]) == "abc"
    assert serve(LeastSlack(), [ask("a", output=5), b, c]) == "acb"


def test_preemptive_slo_pauses_a_job_for_an_earlier_start():
    """Only a preemptive `slo` pauses a job for one with an earlier latest start."""
    requests = [ask("a", output=9), ask("b", at=2, output=3, slo=SLO(deadline_ns=4 * STEP))]
    assert serve(LeastSlack(), requests) == "ab"
    assert serve(LeastSlack(preemptive=True), requests) == "aba"


def test_preemptive_priority_pauses_a_job_of_lower_priority():
    """Only a preemptive `priority` pauses a job for one with a higher priority."""
    requests = [ask("a", output=9), ask("b", at=2, priority=1)]
    assert serve(Priority(), requests) == "ab"
    assert serve(Priority(preemptive=True), requests) == "aba"


def test_ageing_outweighs_a_level_of_priority():
    """With `ageing=0.1`, an arrival 0.1 s earlier outweighs one level of priority."""
    requests = [ask("a", output=99), ask("b", at=1), ask("c", at=12, priority=1)]
    assert serve(Priority(ageing=0.1), requests) == "abc"
    assert serve(Priority(ageing=0.11), requests) == "acb"


def test_lpm_ranks_by_match_within_its_sample():
    """A request behind the sample is not ranked by its match until it enters the sample."""
    requests = [ask("a", keys="pq"), *(ask(name) for name in "bc"), ask("d", keys="pq")]
    assert serve(LPM(sample=3), requests) == "adbc"
    assert serve(LPM(sample=2), requests) == "abdc"


def test_lpm_beyond_its_sample_may_be_first_come_first_served():
    """With `beyond=fcfs`, a queue longer than the sample runs in the order of arrival."""
    requests = [ask("a", keys="pq"), ask("b"), ask("c", keys="pq"), ask("d")]
    assert serve(LPM(sample=2), requests) == "acbd"
    assert serve(LPM(sample=2, beyond="fcfs"), requests) == "abcd"


def test_lpm_defers_the_second_request_of_a_common_prefix():
    """With `defer_shared`, the second of two requests with a common prefix runs last.

    Its prefix must be as long as the option, and nothing of it may be cached.
    """
    requests = [ask("a", keys="pq"), ask("b", keys="pq"), ask("c", keys="rs")]
    assert serve(LPM(), requests, max_seqs=2) == "abc"
    assert serve(LPM(defer_shared=8), requests, max_seqs=2) == "acb"
    assert serve(LPM(defer_shared=12), requests, max_seqs=2) == "abc"


def test_lpm_probes_no_request_without_need():
    """Requests are probed only when the plan is asked for a job to admit."""
    probed = []

    class Server(ToyServer):
        def probe(self, request, now):
            probed.append(request.id)
            return super().probe(request, now)

    server = Server(LPM())
    plan = server._scheduler.plan(LoopState(0, [job(ask("a"))], [], 0, 0, server))
    assert probed == []
    assert [one.request.id for one in plan.admit] == probed == ["a"]


def test_an_unknown_length_in_code_is_refused():
    """An unknown `length` given in code raises InputError with the known values."""
    with pytest.raises(InputError, match="length='guess' is not known; there are: true, pred"):
        SRPT(length="guess")
