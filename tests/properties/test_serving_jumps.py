"""Whatever a server is made of: jumps and traces change nothing, and nothing is lost."""

import attrs
import pytest
from hypothesis import find, given, settings
from serving import COLUMNS, SCHEDULERS, STAND_INS, Bent, Single, servers

from kvcore import Plugins
from kvcore.specs import parse
from kvcore.trace import replay

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
few = settings(max_examples=max(settings.default.max_examples // 2, 1))


def outcome(run):
    """Return all that a run decided, as far as it is known without a trace."""
    log = run.result.log
    columns = {column: getattr(log, column) for column in COLUMNS}
    work = (log.steps, log.busy, log.prefill, log.pairs, log.decode, log.context)
    return (
        log.ids,
        log.reasons,
        columns,
        work,
        log.itl.distribution(1),
        attrs.asdict(run.result.cache.stats),
    )


@every_scheduler
@given(server=servers())
def test_jumps_change_nothing(scheduler, server):
    """Many decode steps at once or one by one: the same trace, byte for byte."""
    jumps, steps = server.run(scheduler), server.run(scheduler, jumps=False)
    assert jumps.trace == steps.trace
    assert outcome(jumps) == outcome(steps)


@every_scheduler
@few
@given(server=servers())
def test_a_trace_changes_nothing(scheduler, server):
    """Where nobody writes, and blocks are only counted, the decisions are the same."""
    untraced = outcome(server.run(scheduler, trace=False))
    assert untraced == outcome(server.run(scheduler))
    assert untraced == outcome(server.run(scheduler, trace=False, jumps=False))


@given(server=servers())
@few
def test_a_model_that_foresees_nothing(server):
    """Asked for each step by itself, a latency model leads to the same trace but its name."""
    foreseen = server.run("fcfs", latency=Bent(reach=server.windows))
    asked = server.run("fcfs", latency=Single(reach=server.windows))
    assert foreseen.lines == asked.lines


@every_scheduler
@few
@given(server=servers())
def test_nothing_is_lost(tmp_path_factory, scheduler, server):
    """Every request ends once, every token is computed, and the trace can be replayed."""
    run = server.run(scheduler)
    everybody = {request.id: request for request in server.requests}
    assert set(run.rows).isdisjoint(run.rejected)
    assert {*run.rows, *run.rejected} == set(everybody)
    ends = [line["request"] for line in run.lines if line["event"] in {"FINISH", "REJECT"}]
    assert sorted(ends) == sorted(everybody)
    _check_work(run, everybody)
    path = tmp_path_factory.mktemp("nothing") / "trace.jsonl"
    path.write_bytes(run.trace)
    report = replay(path)
    assert (report.finished, report.rejected) == (len(run.rows), len(run.rejected))
    assert report.pool["private"] == 0
    assert report.preemptions == {
        "pause": run.sum("pauses"),
        "recompute": run.sum("recomputes"),
    }


def _check_work(run, everybody):
    """Check that tokens were generated once each, and prompts computed at least once."""
    log = run.result.log
    first = sum(everybody[name].output > 0 for name in run.rows)
    assert first + log.itl.count == run.sum("output")
    assert log.prefill >= run.sum("prompt") - run.sum("hit")
    if not run.sum("recomputes"):
        assert log.prefill == run.sum("prompt") - run.sum("hit")
    for name, row in run.rows.items():
        request = everybody[name]
        times = [row["arrival"], row["admitted"], row["finish"]]
        if request.output:
            times.insert(2, row["first_token"])
        assert times == sorted(times)
        assert (row["prompt"], row["output"]) == (request.prompt, request.output)


@every_scheduler
@few
@given(server=servers())
def test_little(scheduler, server):
    """Requests in the server, summed over time as its trace tells, are their times in it."""
    run = server.run(scheduler)
    present = area = then = 0
    for line in run.lines:
        area += present * (line["t"] - then)
        then = line["t"]
        present += {"REQUEST": 1, "FINISH": -1, "REJECT": -1}.get(line["event"], 0)
    assert present == 0
    assert area == run.sum("finish") - run.sum("arrival")


@every_scheduler
@few
@given(server=servers())
def test_seats_are_not_taken_twice(scheduler, server):
    """Never do more requests run than may; those that do not are paused or hold nothing."""
    running = set()
    for line in server.run(scheduler).lines:
        if line["event"] in {"HIT", "MISS", "RESUME"}:
            running.add(line["request"])
        elif line["event"] in {"PREEMPT", "FINISH"}:
            running.discard(line["request"])
        assert len(running) <= server.options["max_seqs"]


@pytest.mark.parametrize("event", ["pauses", "recomputes"])
def test_random_servers_preempt(event):
    """The servers above are tight enough for preemption of either kind."""
    find(servers(), lambda server: server.run("urgent", trace=False).sum(event) > 0)


def test_every_scheduler_is_in_the_list():
    """Each registered scheduler is tried with some options."""
    plugins = {parse(name)[0].name for name in SCHEDULERS if name not in STAND_INS}
    assert plugins == set(Plugins().names("scheduler"))
