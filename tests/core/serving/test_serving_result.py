"""The result of a run, with numbers that can be checked by hand."""

from __future__ import annotations

import json
import pickle
from array import array
from fractions import Fraction

import pytest
from helpers.jobs import job
from helpers.serving import BLOCK, Even, ask, batching_of, serve
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore
from kvcore import SLO, InputError, KVCache
from kvcore.request import KeyPrefix, Request
from kvcore.serving import Batching, Result, simulate
from kvcore.serving.stats import UNJUDGED, RunLog
from kvcore_engine.engine import run as run_on_tensors
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Linear
from kvcore_plugins.prefix import NoPrefix

NS = 10**9


def run(requests, *, blocks=1000, slo=None, latency=None, retention=None, **batching):
    """Serve requests without shared blocks, in steps of 10 ns."""
    return simulate(
        requests,
        cache=KVCache(blocks, BLOCK, eviction=LRU(), prefix=NoPrefix(), retention=retention),
        latency=Even() if latency is None else latency,
        batching=batching_of(**{"watermark": 0} | batching),
        slo=slo,
    )


def three(**options):
    """Return the result of three requests, the second of which is rejected.

    Steps end at 10, 20 and 30 ns. The first request prefills in the first step and decodes
    in the other two; the third arrives in the first step and prefills in the second.
    """
    requests = [
        ask("long", at=0, output=3),
        ask("huge", at=5, prompt=4001),
        ask("short", at=5, output=1, tenant="t"),
    ]
    return run(requests, **options)


def rows(result):
    """Return the columns of each request as a dict, by id."""
    columns = result.requests
    names = list(columns)
    return {
        row[0]: dict(zip(names, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    }


def evenly(nanoseconds):
    """Return the distribution of samples that are all equal."""
    return dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), nanoseconds / NS)


def test_the_columns_of_a_request():
    """The columns of a request are in seconds; durations count from its arrival."""
    assert rows(three())["long"] == {
        "id": "long",
        "status": "finished",
        "reason": None,
        "tenant": None,
        "arrival_s": 0.0,
        "admitted_s": 0.0,
        "finish_s": 30 / NS,
        "queue_s": 0.0,
        "ttft_s": 10 / NS,
        "tpot_s": 10 / NS,
        "e2e_s": 30 / NS,
        "prompt": 4,
        "output": 3,
        "hit_tokens": 0,
        "loaded_tokens": 0,
        "pauses": 0,
        "recomputes": 0,
        "swaps": 0,
        "met_slo": None,
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"latency": "linear"}, {"tier": "host:memory=1GiB"}, {"replicas": 2}],
    ids=str,
)
def test_results_can_be_pickled(options):
    """A result that another process has sent has the summary of the one that it made."""
    call = kvcore.simulate_cluster if "replicas" in options else kvcore.simulate
    result = call("zipf:requests=20", blocks=900, **options)
    copy = pickle.loads(pickle.dumps(result))  # noqa: S301 - of this process
    assert copy.summary() == result.summary()


@pytest.mark.parametrize("block_size", [16, 32])
def test_results_of_shared_paths_of_keys_can_be_pickled(block_size):
    """The spans of a copy have the keys of requests that share a path, whatever the blocks."""
    keys = KeyPrefix(array("q", range(9)), 8)
    request = Request(id=0, prompt_tokens=128, output_tokens=1, keys=keys, key_tokens=16)
    cache = KVCache(99, block_size=block_size, accounting="tokens")
    result = kvcore.simulate([request], cache=cache)
    copy = pickle.loads(pickle.dumps(result))  # noqa: S301 - of this process
    (span,) = copy.cache.tree.root.children.values()
    assert span.keys() == list(keys)[block_size // 16 - 1 :: block_size // 16]


def test_results_can_be_told_apart():
    """A result is equal to itself alone, so that a set can hold those of several runs."""
    one, other = three(), three()
    assert {one, other, one} == {one, other} != {one}


def test_requests_are_in_the_order_of_their_ends():
    """Requests are in the order in which they ended, with rejected ones."""
    result = three()
    assert result.requests["id"] == ["huge", "short", "long"]
    assert {len(column) for column in result.requests.values()} == {3}


def test_a_rejected_request_has_a_reason_and_no_times():
    """A rejected request has its arrival and the reason, and no other times."""
    row = rows(three())["huge"]
    assert (row["status"], row["arrival_s"]) == ("rejected", 5 / NS)
    assert row["reason"] == "it needs 1,001 blocks; the pool has 1,000"
    times = ("admitted_s", "finish_s", "queue_s", "ttft_s", "tpot_s", "e2e_s")
    assert {row[name] for name in times} == {None}


def test_a_request_without_output_has_no_first_token():
    """A request without output has an end-to-end time, but neither TTFT nor TPOT."""
    result = run([ask("none", output=0)])
    row = rows(result)["none"]
    assert (row["ttft_s"], row["tpot_s"], row["e2e_s"]) == (None, None, 10 / NS)
    assert result.summary()["ttft_s"] is None


@pytest.mark.parametrize("bounds", [{}, {"max_model_len": 100}])
def test_what_a_rejected_request_asks_for_is_no_throughput(bounds):
    """There is no throughput if the only request with an output was rejected, why ever."""
    result = run([ask("none", output=0), ask("huge", prompt=4001, output=3)], **bounds)
    assert result.throughput_tokens_s is None


def test_the_summary_of_three_requests():
    """The summary of three requests has the counts, rates and times calculated by hand."""
    summary = three().summary()
    assert summary["schema"] == 1
    assert summary["count"] == "tokens"
    assert (summary["requests"], summary["completed"], summary["rejected"]) == (3, 2, 1)
    assert (summary["simulated_s"], summary["steps"]) == (30 / NS, 3)
    assert summary["throughput_tokens_s"] == pytest.approx(4 / (30 / NS))
    assert summary["ttft_s"] == {
        "mean": 12.5 / NS,
        "p50": 10 / NS,
        "p90": 15 / NS,
        "p95": 15 / NS,
        "p99": 15 / NS,
    }
    assert summary["tpot_s"] == summary["itl_s"] == evenly(10)
    assert summary["e2e_s"]["mean"] == 22.5 / NS
    assert summary["queue_s"]["mean"] == 2.5 / NS
    assert summary["preemptions"] == {"pause": 0, "recompute": 0, "swap": 0}
    assert summary["evicted_blocks"] == 0
    assert summary["pins"] == {"refused_blocks": 0, "yielded": 0}
    assert summary["residency"] is None


def test_the_pool_over_time():
    """The pool has 1 active block for 10 ns, 3 for the next 10, and 2 for the last 10."""
    pool = three().summary()["pool"]
    assert (pool["blocks"], pool["block_size"]) == (1000, BLOCK)
    assert pool["active"] == {"mean": 2, "peak": 3}
    assert pool["cached"] == {"mean": 0}
    assert pool["timeline"] == {
        "t_s": [0.0, 10 / NS, 20 / NS, 30 / NS],
        "active": [1, 3, 2, 0],
        "cached": [0, 0, 0, 0],
        "free": [999, 997, 998, 1000],
    }


def test_a_run_without_requests():
    """A run without requests has counts of 0, and null rates and distributions."""
    result = run([])
    summary = result.summary()
    assert (summary["requests"], summary["simulated_s"], summary["steps"]) == (0, 0, 0)
    assert (result.ttft, result.itl, result.hit_ratio.token) == (None, None, None)
    names = ("offered_load", "ttft_s", "itl_s", "throughput_tokens_s", "goodput", "residency")
    assert {summary[name] for name in names} == {None}


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(ttft_ns=15), [False, True, True]),
        (SLO(ttft_ns=14), [False, False, True]),
        (SLO(tpot_ns=10), [False, None, True]),
        (SLO(tpot_ns=9), [False, None, False]),
        (SLO(deadline_ns=29), [False, True, False]),
        (SLO(ttft_ns=14, deadline_ns=30), [False, False, True]),
    ],
)
def test_a_request_meets_its_slo_if_every_bound_holds(slo, met):
    """A request meets its SLO if every bound with a sample holds; a rejected one does not.

    A request of one token has no TPOT, so an SLO of TPOT alone does not judge it.
    """
    result = three(slo=slo)
    assert result.requests["met_slo"] == met
    judged = [verdict for verdict in met if verdict is not None]
    found = result.summary()["slo"]
    assert (found["judged"], found["met"]) == (len(judged), sum(judged) / len(judged))


BOUND = st.none() | st.integers(1, 4)


@settings(max_examples=300)
@given(BOUND, BOUND, BOUND, *[st.integers(0, 4)] * 4, st.booleans())
@example(None, None, 1, 0, 0, 0, 0, False)  # noqa: FBT003 - it ends at 0 ns
def test_a_verdict_is_that_of_every_bound_with_a_sample(
    ttft, tpot, deadline, arrival, until_first, until_last, output, rejected
):
    """A request meets its SLO by all bounds that have a sample; a rejected one by none.

    Times are from 0 ns on, and an answer of one token has no TPOT, one of none no TTFT.
    """
    slo = SLO(ttft_ns=ttft, tpot_ns=tpot, deadline_ns=deadline)
    ended = job(ask("a", arrival, 4, output, slo=slo))
    ended.first_token = arrival + until_first if output else None
    samples = [
        (deadline, until_first + until_last),
        (ttft, until_first if output else None),
        (tpot, until_last / (output - 1) if output > 1 else None),
    ]
    log = RunLog(9)
    if rejected:
        log.rejected(ended, "too long")
        held = [False for bound, _ in samples if bound]
    else:
        log.ended(ended, arrival + until_first + until_last)
        held = [time <= bound for bound, time in samples if bound and time is not None]
    assert list(log.verdict) == [all(held) if held else UNJUDGED]


def test_goodput_is_requests_within_the_slo_over_time():
    """Goodput is the number of requests within the SLO over the time of the run.

    There is none without an SLO, nor for a run that takes no time.
    """
    assert three().goodput is None
    assert run([ask("huge", prompt=4001)], slo=SLO(ttft_ns=15)).goodput is None
    summary = three(slo=SLO(ttft_ns=15)).summary()
    assert summary["goodput"] == pytest.approx(2 / (30 / NS))
    assert summary["slo"] == {
        "ttft_s": 15 / NS,
        "tpot_s": None,
        "deadline_s": None,
        "own": 0,
        "judged": 3,
        "met": 2 / 3,
    }


def test_the_slo_of_a_request_precedes_that_of_the_run():
    """The SLO of the run applies to requests without an SLO of their own."""
    requests = [ask("patient", slo=SLO(ttft_ns=10)), ask("usual")]
    result = run(requests, slo=SLO(ttft_ns=9))
    assert result.requests["met_slo"] == [True, False]
    assert result.summary()["slo"]["own"] == 1


@pytest.mark.parametrize(
    ("load", "options"),
    [
        # 1 step to prefill and 2 to decode, 12 in all, two at a time
        (0.75, {"max_seqs": 2}),
        # 24 tokens, two at a time
        (1.5, {"max_seqs": 2, "max_tokens": 2}),
        # K/V of 5 + 6 tokens for each of 4 requests, in a pool of 8 tokens
        (0.6875, {"max_seqs": 4, "blocks": 2}),
        # 4 steps of prefill and 8 of decoding, two at a time, in separate steps
        (0.75, {"max_seqs": 2, "steps": "prefill-first"}),
        # 16 prompt tokens in steps of 2, and 8 steps of decoding
        (1.5, {"max_seqs": 2, "max_tokens": 2, "steps": "prefill-first"}),
        # prompts are not chunked, so a step may have the 4 tokens of a prompt
        (0.75, {"max_seqs": 2, "max_tokens": 2, "chunked": False}),
        (1.5, {"max_seqs": 1}),
    ],
)
def test_the_offered_load_is_a_share_of_the_time_between_arrivals(load, options):
    """The offered load is the time that a request needs over that between two arrivals.

    Every 20 ns a request arrives that needs three steps of 10 ns.
    """
    requests = [ask(index, at=20 * index, output=3) for index in range(4)]
    assert run(requests, **options).summary()["offered_load"] == load


@pytest.mark.parametrize("retention", ["window:tokens=8", "h2o:budget=8"])
def test_the_offered_load_of_a_bounded_run_is_a_lower_bound_too(retention):
    """With a retention policy, the offered load is no more than the measured busy time."""
    requests = [ask(index, at=index, output=400) for index in range(50)]
    result = run(requests, blocks=400, retention=retention, latency=Linear())
    assert 0 < result.offered_load <= result.log.busy_ps / 1000 / 50


@pytest.mark.parametrize(("output", "load"), [(0, 0.5), (1, 0.5), (2, 1.0)])
def test_a_load_without_decoding_is_that_of_prefill_alone(output, load):
    """Where no token is decoded, the load is that of prefill, to the picosecond."""
    requests = [ask(index, at=20 * index, output=output) for index in range(4)]
    assert run(requests, max_seqs=1, steps="prefill-first").offered_load == load


def test_the_offered_load_of_one_sequence_is_that_of_queueing_theory():
    """For one sequence at a time, the load is arrival rate x mean service time (M/G/1)."""
    requests = [
        ask(index, at=index * 40_000_000, prompt=1 + index * 37 % 100, output=index % 7)
        for index in range(50)
    ]
    result = run(requests, latency=Linear(), max_seqs=1, max_tokens=16)
    service = Fraction(result.log.busy_ps, 50)
    rate = Fraction(49, (requests[-1].arrival - requests[0].arrival) * 1000)
    assert result.summary()["offered_load"] == pytest.approx(float(rate * service), rel=1e-12)


def test_tokens_within_a_nanosecond_count_as_no_time():
    """A request whose tokens all come within a nanosecond has a TPOT of 0, and counts."""
    log = RunLog(1)
    for last in (5, 15):
        served = job(ask("a", 0, 4, 3))
        served.first_token = 5
        log.ended(served, last)
    assert list(log.tpot()) == [0, 5000]


@pytest.mark.parametrize("ats", [[0], [0, 0], [7, 7, 7]])
def test_arrivals_at_one_time_have_no_rate(ats):
    """Requests that all arrive at once have no offered load."""
    requests = [ask(index, at=at) for index, at in enumerate(ats)]
    assert run(requests).summary()["offered_load"] is None


def test_attributes_of_the_result_equal_the_summary():
    """The attributes of the result equal the values of the summary."""
    result = three(slo=SLO.in_seconds(ttft=15e-9))
    summary = result.summary()
    for name in ("ttft", "tpot", "itl", "e2e", "queue"):
        assert getattr(result, name).as_dict() == summary[f"{name}_s"]
    for name in ("offered_load", "simulated_s", "throughput_tokens_s", "goodput"):
        assert getattr(result, name) == summary[name]
    assert result.slo_attainment == summary["slo"]["met"]
    ratio = result.hit_ratio
    assert summary["hit"]["ratio"] == {
        "block": ratio.block,
        "token": ratio.token,
        "request": ratio.request,
    }


def test_a_frame_has_a_row_per_request():
    """`to_frame` returns a frame with the columns of `requests`.

    Times are numbers, though none may be known.
    """
    polars = pytest.importorskip("polars")
    result = three()
    frame = result.to_frame()
    assert frame.columns == list(result.requests)
    assert frame["e2e_s"].to_list() == result.requests["e2e_s"]
    assert run([ask("huge", prompt=4001)]).to_frame()["e2e_s"].dtype == polars.Float64


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf"), "30"])
def test_an_slo_in_seconds_is_checked(time):
    """A time of an SLO that is not finite and positive raises InputError."""
    with pytest.raises(InputError, match=r"SLO tpot=.*give seconds"):
        SLO.in_seconds(tpot=time)


def test_both_files_are_written(tmp_path):
    """`write` writes the summary as JSON, and a line per request with its columns."""
    result = three()
    result.write(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["requests.jsonl", "summary.json"]
    assert json.loads((folder / "summary.json").read_text()) == result.summary()
    lines = (folder / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(rows(result).values())


@pytest.mark.parametrize("name", [2**70, "a\udc80"])
def test_a_request_that_json_cannot_name_is_refused(tmp_path, name):
    """An id beyond 64 bits or with half a character raises InputError with that id."""
    result = run([ask(name, at=0)])
    with pytest.raises(InputError, match="cannot be written as JSON") as error:
        result.write(tmp_path)
    assert str(error.value).startswith(f"request {name!r} ")
    assert not [*tmp_path.iterdir()]


def test_a_write_that_fails_leaves_older_files_unchanged(tmp_path, monkeypatch):
    """A `write` that fails leaves older files unchanged, and no partial ones."""
    (tmp_path / "requests.jsonl").write_text("older")

    def fail(_):
        raise RuntimeError

    monkeypatch.setattr(Result, "summary", fail)
    with pytest.raises(RuntimeError):
        three().write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]
    assert (tmp_path / "requests.jsonl").read_text() == "older"


def test_the_wall_time_is_measured():
    """The wall time is positive, and the only value that differs between equal runs."""
    first, second = three(), three()
    assert first.wall_s > 0
    assert first.summary() | {"wall_s": 0} == second.summary() | {"wall_s": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": {"max_seqs": 4}}, r"batching={'max_seqs': 4}: give a Batching, such as"),
        ({"batching": Batching}, "give a Batching"),
        ({"slo": {"ttft": 5}}, r"slo={'ttft': 5}: give an SLO in ns, such as SLO\(ttft_ns="),
        ({"slo": 0.5}, r"slo=0\.5: give an SLO"),
    ],
)
def test_batching_or_slo_of_another_type_is_refused(options, message):
    """A `batching` or `slo` of another type raises InputError with an example."""
    cache = KVCache(8, BLOCK, eviction=LRU())
    with pytest.raises(InputError, match=message):
        simulate([ask("one")], cache=cache, latency=Even(), **options)
    with pytest.raises(InputError, match=message):
        run_on_tensors([], cache=cache, generator="transformer", backend="numpy", **options)


def test_a_run_without_residency_is_otherwise_unchanged():
    """With `residency=False` the summary has no residency, and is otherwise unchanged."""
    requests = [ask(n, at=10 * n, prompt=8, output=4, keys=(n % 2, 2 + n)) for n in range(9)]

    def summary(**options):
        cache = KVCache(6, BLOCK, key_tokens=BLOCK)
        return simulate(requests, cache=cache, latency=Even(), **options).summary()

    whole, spared = summary(), summary(residency=False)
    assert (whole.pop("residency") is None, spared.pop("residency")) == (False, None)
    assert whole | {"wall_s": 0} == spared | {"wall_s": 0}


@pytest.mark.parametrize("traced", [True, False])
def test_blocks_evicted_in_a_jump_are_restored_one_by_one(traced):
    """Blocks evicted in a jump have left one after the other, whether counted or traced."""
    requests = [
        ask("first", 0, 17, keys=range(4)), ask("grows", 1000, 4, 13),
        ask("other", 2000, 17, keys=range(10, 14)), ask("again", 3000, 17, keys=range(4)),
    ]  # fmt: skip
    cache = serve(requests, blocks=5, trace=traced).result.cache
    assert cache.residency_by_tier()["gpu"]["restored_blocks"] == 2
