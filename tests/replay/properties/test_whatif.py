"""`whatif` without changes, which writes a recorded trace again byte for byte."""

import tempfile
from io import BytesIO
from pathlib import Path

import attrs
import hypothesis.strategies as st
import pytest
from helpers.engine import Exact, compute, decided
from helpers.policies import build
from helpers.retention import Budget, Eager
from helpers.schedulers import SCHEDULERS, STAND_INS, scheduler_of
from helpers.serving import EVICTIONS, Bent, Single, batching_of, servers
from hypothesis import given, settings

from kvcore import SLO, KVCache, Plugins, Trace
from kvcore.hookspecs import hookimpl
from kvcore.request import Retention, text_request
from kvcore.serving import simulate
from kvcore.testing import Traffic
from kvcore.testing.harness import request_lists
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import Zipf
from kvcore_replay.untimed import replay
from kvcore_replay.what_if import whatif

few = settings(max_examples=max(settings.default.max_examples // 4, 1))


class StandIns:
    """The schedulers, latency models and policies of these tests, as plugins with names."""

    @hookimpl
    def kvcore_schedulers(self):
        """Return the schedulers."""
        return list(STAND_INS.values())

    @hookimpl
    def kvcore_latency_models(self):
        """Return the latency models."""
        return [Bent, Single]

    @hookimpl
    def kvcore_retention_policies(self):
        """Return the retention policies."""
        return [Budget, Eager]


PLUGINS = Plugins(extra=[StandIns()])
SCALES = (1.0, 1, 3, 0.3, 1.7, 1e6, 1e-3)
SLOS = (None, SLO(), SLO(ttft_ns=200), SLO(ttft_ns=90, tpot_ns=30, deadline_ns=900))


def again(trace, **asked):
    """Return the result of `whatif` on the bytes of a trace, and the bytes of the new trace."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "old.jsonl", Path(folder) / "new.jsonl"
        old.write_bytes(trace)
        return whatif(old, export=new, plugins=PLUGINS, **asked), new.read_bytes()


def with_optional_fields(requests):
    """Return requests with fields that may change the contents of the cache."""
    hints = (), (Retention(0, None, 90, 40),), (Retention(0, 4, 1), Retention(2, 9, 80))
    return [
        attrs.evolve(
            request,
            salt=(None, "blue", "a\u2028b")[index % 3],
            retention=hints[index % 5 % 3],
            slo=request.slo or (None, SLO(), SLO(ttft_ns=50))[index % 3],
            keys=list(map(name_key, request.keys)),
            output_keys=list(map(name_key, request.output_keys)),
        )
        for index, request in enumerate(requests)
    ]


def name_key(key):
    """Return a key of any kind that a trace holds: an int, 16 bytes, 32 hex digits."""
    digits = f"{key:032x}"
    return (key, bytes.fromhex(digits), f"AB{digits[2:]}")[key % 3]


def simulated(server, scheduler, *, latency, scale, slo, prefix, retention):
    """Return the result and the trace of a simulation."""
    options = dict(server.options)
    sizes = {name: options.pop(name) for name in ("block_size", "key_tokens")}
    out = BytesIO()
    with Trace(out, seed=scale if type(scale) is int else None) as trace:
        cache = KVCache(
            options.pop("blocks"),
            eviction=build(server.eviction),
            prefix=PLUGINS.build("prefix", prefix),
            retention=retention and PLUGINS.build("retention", retention),
            trace=trace,
            **sizes,
        )
        result = simulate(
            with_optional_fields(server.requests),
            cache=cache,
            scheduler=scheduler_of(scheduler),
            latency=latency(reach=server.windows),
            batching=batching_of(**options),
            slo=slo,
            rate_scale=scale,
        )
    return result, out.getvalue()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@few
@given(
    server=servers(),
    latency=st.sampled_from([Bent, Single]),
    scale=st.sampled_from(SCALES),
    slo=st.sampled_from(SLOS),
    prefix=st.sampled_from(["radix", "none"]),
    retention=st.sampled_from(
        [
            *(None, None, "window:tokens=9,sinks=2", "eager:tokens=5"),
            *("budget:budget=9", "budget:budget=0.5,when=prompt"),
        ]
    ),
)
def test_whatif_repeats_a_simulation(scheduler, server, latency, scale, slo, prefix, retention):
    """`whatif` repeats a simulation byte for byte, whatever its plugins and options.

    No request changes, and both runs have the figures of the simulation. Sessions and rejected
    requests are included.
    """
    result, trace = simulated(
        server,
        scheduler,
        latency=latency,
        scale=scale,
        slo=slo,
        prefix=prefix,
        retention=retention,
    )
    found, rerun = again(trace)
    assert rerun == trace
    assert not found.changes
    recorded, new = (
        attrs.evolve(figures, config={}) for figures in (found.recorded, found.rerun)
    )
    assert recorded == new
    summary = result.summary()
    same = (
        "requests",
        "completed",
        "rejected",
        "hit",
        "evicted_blocks",
        "preemptions",
        "forgotten_blocks",
        "compactions",
        "compacted_tokens",
    )
    times = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "simulated_s", "goodput")
    for name in (*same, *times, "throughput_tokens_s"):
        assert getattr(new, name) == summary[name], name
    assert new.slo_met == summary["slo"]["met"]


@pytest.mark.parametrize("eviction", EVICTIONS)
@few
@given(
    requests=request_lists(Traffic(hints=True, longest_wait=20)),
    count=st.sampled_from(["keys", "tokens"]),
    prefix=st.sampled_from(["radix", "none"]),
    blocks=st.integers(1, 40),
    size=st.sampled_from([6, 3, 2, 1]),
    retention=st.sampled_from([None, None, "eager:tokens=5", "budget:budget=0.5"]),
)
def test_whatif_repeats_an_untimed_replay(
    eviction, requests, count, prefix, blocks, size, retention
):
    """`whatif` repeats an untimed replay byte for byte, whatever its policy and options.

    This includes both accountings, requests longer than the pool, hints and tenants.
    """
    out = BytesIO()
    with Trace(out) as trace:
        cache = KVCache(
            blocks,
            size,
            eviction=build(eviction),
            prefix=PLUGINS.build("prefix", prefix),
            retention=retention and PLUGINS.build("retention", retention),
            accounting=count,
            key_tokens=6,
            trace=trace,
        )
        stats = replay(with_optional_fields(requests), cache)
    found, rerun = again(out.getvalue())
    assert rerun == out.getvalue()
    assert not found.changes
    assert found.recorded == found.rerun
    assert found.rerun.hit["ratio"] == stats.ratios()
    assert found.rerun.hit["hit_tokens"] == stats.hit_tokens


@pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "fickle"])
@few
@given(server=servers())
def test_whatif_repeats_a_run_on_tensors(scheduler, server):
    """`whatif` repeats a run on tensors without tensors, except for header and END."""
    run = compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        latency=Bent(reach=server.windows),
        **server.options,
    )
    found, rerun = again(run.trace)
    assert decided(rerun) == decided(run.trace)
    assert not found.changes


@pytest.mark.parametrize("scheduler", ["fcfs", "urgent"])
@given(
    texts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 20)),
        min_size=1,
        max_size=8,
    ),
    blocks=st.integers(9, 30),
    seqs=st.integers(1, 4),
)
def test_whatif_repeats_the_keys_of_a_run_on_texts(scheduler, texts, blocks, seqs):
    """`whatif` repeats the keys that only the run knew, at the steps that filled the blocks."""
    requests = [
        text_request(
            index, tokens, output=output, block_size=4, arrival=index * 40, publish=True
        )
        for index, (tokens, output) in enumerate(texts)
    ]
    run = compute(
        requests,
        blocks=blocks,
        scheduler=scheduler,
        generator=Exact(),
        max_seqs=seqs,
        max_tokens=16,
    )
    _, rerun = again(run.trace)
    assert decided(rerun) == decided(run.trace)


@pytest.mark.parametrize("eviction", ["lru", "random", "lookahead:requests=all"])
def test_whatif_repeats_a_comparison(eviction, tmp_path):
    """`whatif` repeats a traced comparison byte for byte, seed and workload's name included.

    Policies without a seed or a view of what comes are repeated the same way as `lru`.
    """
    path = tmp_path / "trace.jsonl.gz"
    workload = Zipf(requests=80, prefixes=30)
    row = compare_policies(workload, eviction, 300, trace=path, seed=3).rows[0]
    found = whatif(path, export=tmp_path / "new.jsonl.gz")
    assert (tmp_path / "new.jsonl.gz").read_bytes() == path.read_bytes()
    assert found.rerun.evicted_blocks == row.evicted_blocks
