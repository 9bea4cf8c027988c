"""Jumps and traces change no decision of any server, and no request or token is lost."""

import pytest
from helpers.schedulers import SCHEDULERS, STAND_INS
from helpers.serving import Bent, Single, Tally, servers, tiered_servers
from hypothesis import Phase, find, given, settings

from kvcore import Plugins
from kvcore.plugins.options import parse
from kvcore_replay.check.trace import check_trace

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
few = settings(max_examples=max(settings.default.max_examples // 3, 1))


@every_scheduler
@few
@given(server=servers() | tiered_servers())
def test_jumps_change_no_decision(scheduler, server):
    """Running many decode steps at once writes the same trace as one step at a time."""
    jumps, steps = server.run(scheduler), server.run(scheduler, jumps=False)
    assert jumps.trace == steps.trace
    assert jumps.decisions == steps.decisions


@every_scheduler
@few
@given(server=servers() | tiered_servers())
def test_a_trace_changes_no_decision(scheduler, server):
    """A run without a trace, in which blocks are only counted, decides the same."""
    untraced = server.run(scheduler, trace=False).decisions
    assert untraced == server.run(scheduler).decisions
    assert untraced == server.run(scheduler, trace=False, jumps=False).decisions


@given(server=servers())
@few
def test_a_latency_model_of_single_steps_changes_no_decision(server):
    """A latency model that must be called for each step gives the same trace.

    Only its name in the header differs.
    """
    foreseen = server.run("fcfs", latency=Bent(reach=server.windows))
    single = server.run("fcfs", latency=Single(reach=server.windows))
    assert foreseen.lines == single.lines


@every_scheduler
@few
@given(server=servers() | tiered_servers())
def test_every_request_ends_once(tmp_path_factory, scheduler, server):
    """Every request ends once, its times are in order, and the trace replays."""
    run = server.run(scheduler)
    everybody = {request.id: request for request in server.requests}
    assert set(run.rows).isdisjoint(run.rejected)
    assert {*run.rows, *run.rejected} == set(everybody)
    ends = [line["request"] for line in run.lines if line["event"] in {"FINISH", "REJECT"}]
    assert sorted(ends) == sorted(everybody)
    for name, row in run.rows.items():
        request = everybody[name]
        times = [row["arrival"], row["admitted"], row["finish"]]
        if request.output_tokens:
            times.insert(2, row["first_token"])
        assert times == sorted(times)
        assert (row["prompt"], row["output"]) == (request.prompt_tokens, request.output_tokens)
    path = tmp_path_factory.mktemp("nothing") / "trace.jsonl"
    path.write_bytes(run.trace)
    report = check_trace(path)
    assert (report.finished, report.rejected) == (len(run.rows), len(run.rejected))
    assert report.pool["private"] == 0
    assert report.preemptions == {
        "pause": run.sum("pauses"),
        "recompute": run.sum("recomputes"),
        "swap": sum(run.result.log.swaps),
    }


@every_scheduler
@few
@given(server=servers())
def test_tokens_are_computed_again_only_after_a_preemption(scheduler, server):
    """All tokens are generated once, and computed again only after a preemption."""
    run = server.run(scheduler, latency=Tally())
    outputs = {request.id: request.output_tokens for request in server.requests}
    first = sum(outputs[name] > 0 for name in run.rows)
    assert first + run.result.log.itl.count == run.sum("output")
    decode, prefill = divmod(run.result.log.busy_ps, Tally.TOKEN)
    again = run.sum("output") - first - decode
    assert 0 <= again <= run.sum("recomputes")
    computed = prefill - (run.sum("prompt") - run.sum("hit"))
    assert computed > 0 if again else computed >= 0
    assert computed == 0 or run.sum("recomputes")


@every_scheduler
@few
@given(server=servers() | tiered_servers())
def test_littles_law(scheduler, server):
    """The requests in the server, summed over time along the trace, are their times in it."""
    run = server.run(scheduler)
    present = area = then = 0
    for line in run.lines:
        area += present * (line["t"] - then)
        then = line["t"]
        present += {"REQUEST": 1, "FINISH": -1, "REJECT": -1}.get(line["event"], 0)
    assert present == 0
    assert area == run.sum("finish") - run.sum("arrival")


@pytest.mark.parametrize("event", ["pauses", "recomputes"])
def test_random_servers_preempt(event):
    """Random servers are tight enough for preemptions of both kinds."""
    generated = settings(phases=[Phase.generate])
    preempts = lambda server: server.run("urgent", trace=False).sum(event) > 0  # noqa: E731
    find(servers(), preempts, settings=generated)


def test_every_scheduler_is_in_the_list():
    """Each registered scheduler is tested with some options."""
    plugins = {parse(name)[0].name for name in SCHEDULERS if name not in STAND_INS}
    assert plugins == set(Plugins().names("scheduler"))
