"""The scheduler `fair`: virtual token counters of tenants."""

from __future__ import annotations

import pytest
from helpers.jobs import PROMPT, ask, job, serve

from kvcore import InputError
from kvcore.serving import LoopState
from kvcore.testing import STEP, ToyServer
from kvcore_plugins.scheduler import Fair


def counters(scheduler, requests, max_seqs=1):
    """Return the counters of the tenants after `requests` are served."""
    ToyServer(scheduler, max_seqs, 10**5).run(requests)
    return scheduler._counters


def test_weights_are_exact():
    """Counters are exact integers on the common scale of both weights."""
    scheduler = Fair(prefill_weight=0.1, decode_weight=0.3)
    requests = [ask(f"{index}", output=3, tenant="x") for index in range(100)]
    prefill, decode = scheduler._weights
    assert prefill / decode == pytest.approx(1 / 3)
    assert counters(scheduler, requests) == {"x": 100 * (PROMPT * prefill + 3 * decode)}


@pytest.mark.parametrize("weight", ["2", None, True, float("nan"), 0, -1.0])
def test_a_weight_is_a_positive_number(weight):
    """A weight of another type, or none above 0, is refused and named."""
    message = f"fair: prefill_weight={weight!r} must be a positive number"
    with pytest.raises(InputError, match=message):
        Fair(prefill_weight=weight)


def test_shares_are_of_tokens_not_of_requests():
    """A tenant with requests of three times the tokens gets a third as many admitted."""
    large = [ask(name, prompt=3 * PROMPT, output=3, tenant="x") for name in "ABC"]
    small = [ask(name, output=1, tenant="y") for name in "abcdefgh"]
    # A request of tenant x counts 54, one of y 18.
    assert serve(Fair(), [*large, *small]) == "AabcBdefCgh"


def test_generated_tokens_are_charged_step_by_step():
    """Generated tokens are charged step by step, so long outputs cost turns as they grow."""
    outputs = {"a": 50, "b": 2, "c": 1, "d": 1, "g": 1, "e": 1}
    tenants = dict(zip("abcdge", "xyxyxy", strict=True))
    requests = [ask(name, output=outputs[name], tenant=tenants[name]) for name in outputs]
    # At step 4, x is charged 2 prompts and 5 tokens, 4 of them of the running a; y 2 and 3.
    assert serve(Fair(), requests, max_seqs=2) == "abcdeg"


def test_a_tenant_that_returns_has_no_credit():
    """A tenant that returns starts with the least counter of the waiting tenants."""
    busy = [ask(name, output=9, tenant="x") for name in "abcd"]
    back = [ask(name, at=20, output=9, tenant="y") for name in "yz"]
    # By step 20, x has three prompts admitted; starting from 0, y would go twice.
    assert serve(Fair(), [*busy, *back]) == "abcydz"


def test_a_tenant_at_an_empty_queue_starts_with_the_last_counter():
    """A tenant that arrives at an empty queue starts with the counter of the last to leave."""
    scheduler = Fair()
    requests = [ask("a", output=9, tenant="x"), ask("b", at=30, tenant="y")]
    assert counters(scheduler, requests) == {"x": 16 + 18, "y": 16 + 18 + 16 + 2}


def test_recomputed_tokens_are_not_charged_again():
    """Tokens recomputed after a preemption are not charged again."""
    scheduler = Fair()
    ToyServer(scheduler)
    one = job(ask("a", output=9, tenant="x"))
    scheduler.queued(one, 0)
    scheduler.admitted(one, 0)
    one.generated_before = 4
    scheduler.queued(one, STEP)
    assert scheduler._counters == {"x": 16 + 8}
    scheduler.admitted(one, STEP)
    one.generated_before = 9
    scheduler.finished(one, 2 * STEP)
    assert scheduler._counters == {"x": 16 + 18}


def test_the_priority_of_a_job_is_the_counter_of_its_tenant():
    """A job's priority is its tenant's counter, with the tokens generated so far."""
    scheduler = Fair()
    ToyServer(scheduler)
    jobs = [job(ask(name, output=9, tenant=name), serial) for serial, name in enumerate("xy")]
    for one in jobs:
        scheduler.queued(one, 0)
    for one, generated in zip(jobs, (3, 5), strict=True):
        scheduler.admitted(one, 0)
        one.generated_before = generated
    assert [scheduler.priority(one, STEP) for one in jobs] == [16 + 6, 16 + 10]


def test_a_plan_ends_with_the_first_job_that_is_not_admitted():
    """A plan offers the next job only after the one before it was admitted."""
    scheduler = Fair()
    server = ToyServer(scheduler)
    jobs = [job(ask(name, tenant=name), serial) for serial, name in enumerate("xyz")]
    for one in jobs:
        scheduler.queued(one, 0)
    state = LoopState(0, jobs, [], 3, 1000, server)
    assert list(scheduler.plan(state).admit) == [jobs[0]]
    offered = iter(scheduler.plan(state).admit)
    for one in jobs:
        assert next(offered) is one
        scheduler.admitted(one, 0)
    assert next(offered, None) is None
