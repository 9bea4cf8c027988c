"""Sequences that forget: the same decisions everywhere, and the right tokens on tensors."""

import pytest
from engine import compute, decided
from hypothesis import given
from hypothesis import strategies as st
from serving import Bent, servers

from kvcore.trace import replay
from kvcore_plugins.retention import Window

windows = st.builds(
    lambda tokens, sinks: {"tokens": tokens, "sinks": sinks},
    st.sampled_from((1, 3, 4, 9, 20)),
    st.sampled_from((0, 1, 4, 6)),
)
schedulers = pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "fickle"])


def simulated(server, scheduler, window, **options):
    """Serve what a random server serves, with a window over its sequences."""
    return server.run(scheduler, retention=Window(**window), **options)


def replayed(trace, path):
    """Return what a trace holds, after checking every line of it."""
    path.write_bytes(trace)
    return replay(path)


@schedulers
@given(server=servers(), window=windows)
def test_jumps_are_single_steps(scheduler, server, window):
    """Blocks are forgotten at the same times, whether steps are run one by one or not."""
    jumping, stepping = (simulated(server, scheduler, window, jumps=j) for j in (True, False))
    assert jumping.trace == stepping.trace


@schedulers
@given(server=servers(), window=windows)
def test_counting_decides_alike(scheduler, server, window):
    """A run in which blocks have no ids ends the same requests at the same times."""
    told, counted = (simulated(server, scheduler, window, trace=t) for t in (True, False))
    assert told.rows == counted.rows


@given(server=servers(), window=windows)
def test_a_trace_can_be_replayed(tmp_path_factory, server, window):
    """Every line follows from those before it, and in the end everything is free or cached."""
    run = simulated(server, "urgent", window)
    report = replayed(run.trace, tmp_path_factory.mktemp("trace") / "run.jsonl")
    assert (report.complete, report.pool["private"]) == (True, 0)
    assert report.pool["cached"] == run.result.cache.prefix.cached


@schedulers
@given(server=servers(), window=windows)
def test_same_decisions_on_tensors(scheduler, server, window):
    """Under the model's clock the trace is the simulator's, but for header and END."""
    run = compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        retention=Window(**window),
        latency=Bent(reach=server.windows),
        **server.options,
    )
    assert decided(run.trace) == decided(simulated(server, scheduler, window).trace)
