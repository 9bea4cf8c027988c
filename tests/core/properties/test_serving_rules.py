"""Servers under the rules of engines: jumps change no decision, and no request is lost."""

from functools import partialmethod
from random import Random

import pytest
from helpers.engine import compute, decided
from helpers.schedulers import SCHEDULERS
from helpers.serving import RULES, Bent, random_ruled_server, ruled_servers
from hypothesis import assume, given, settings

from kvcore.serving import Batching, Rules
from kvcore.serving.rules import DECISIONS
from kvcore_replay.check.trace import check_trace

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
few = settings(max_examples=max(settings.default.max_examples // 3, 1))


def assume_order(scheduler, server):
    """Leave out servers that are known to preempt in circles.

    Where prompts get their blocks chunk by chunk and the server does not ensure that all fit,
    jobs that a plan puts first must not be the first to be preempted.
    """
    own_plan = scheduler.partition(":")[0] in ("lpm", "planning")
    assume(not own_plan or server.options.get("reserve") != "first-chunk")


@every_scheduler
@few
@given(server=ruled_servers())
def test_jumps_change_no_decision(scheduler, server):
    """Decisions are the same with jumps and without, traced or not."""
    assume_order(scheduler, server)
    jumps, steps = server.run(scheduler), server.run(scheduler, jumps=False)
    assert jumps.trace == steps.trace
    assert jumps.decisions == steps.decisions == server.run(scheduler, trace=False).decisions


@every_scheduler
@few
@given(server=ruled_servers())
def test_a_trace_can_be_replayed(tmp_path_factory, scheduler, server):
    """Every request ends once, and its trace replays without error."""
    assume_order(scheduler, server)
    run = server.run(scheduler)
    assert {*run.rows, *run.rejected} == {request.id for request in server.requests}
    path = tmp_path_factory.mktemp("rules") / "trace.jsonl"
    path.write_bytes(run.trace)
    report = check_trace(path)
    assert (report.finished, report.rejected) == (len(run.rows), len(run.rejected))


class Asked(Rules):
    """Rules that are asked for every decision, and answer as kvcore's own."""

    name = "asked"


for name in DECISIONS:
    setattr(Asked, name, partialmethod(getattr(Rules, name)))


@every_scheduler
@few
@given(server=ruled_servers())
def test_methods_say_what_the_loop_does_without_them(scheduler, server):
    """Rules that override each method with that of the base class decide the same."""
    assume_order(scheduler, server)
    inline, asked = server.run(scheduler), server.run(scheduler, rules=Asked)
    assert decided(asked.trace) == decided(inline.trace)
    assert asked.decisions == inline.decisions


@pytest.mark.parametrize("seed", [1368, 1548])
def test_rules_that_keep_nothing_share_keyed_blocks_when_others_do(seed):
    """Blocks with keys are shared as without `keeps_generated`, under a lag too."""
    server = random_ruled_server(Random(seed).randint)
    asked = server.run("srpt:preemptive=false", rules=Asked)
    assert decided(asked.trace) == decided(server.run("srpt:preemptive=false").trace)


@pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "planning"])
@few
@given(server=ruled_servers())
def test_a_run_on_tensors_has_the_trace_of_the_simulator(scheduler, server):
    """A run on tensors has the simulator's trace, except for header and END."""
    assume_order(scheduler, server)
    assume(scheduler != "urgent" or server.options.get("commit") != "scheduled")
    run = compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        latency=Bent(reach=server.windows),
        tiers=server.tiers,
        **server.options,
    )
    assert decided(run.trace) == decided(server.run(scheduler).trace)


def test_random_servers_draw_every_rule():
    """Random servers draw every value of every rule of `Batching`, its default among them."""
    limits = {"max_tokens", "max_seqs", "chunked", "steps", "watermark"}
    defaults = Batching().as_dict(complete=True)
    assert set(RULES) == set(defaults) - limits
    assert all(defaults[name] in values for name, values in RULES.items())
    options = [random_ruled_server(Random(seed).randint).options for seed in range(300)]
    drawn = {(name, server[name]) for server in options for name in RULES if name in server}
    assert drawn == {(name, value) for name, values in RULES.items() for value in values}
