"""Clusters with separate prefill and decode replicas, on random requests and small pools."""

from collections import Counter
from tempfile import NamedTemporaryFile

import pytest
from helpers.clusters import serve_cluster
from helpers.serving import BLOCK, SLOT, ask
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore_replay.check.trace import check_trace

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.text("ab", min_size=1, max_size=6),
        st.integers(1, 3),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=14,
)
"""Time since the last request, keys of the prompt, tokens of its last block, output."""

SPLITS = st.builds(
    "prefill={},decode={},mixed={},bandwidth={},latency={}ns,overlap={},queue={},first_output={}".format,
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 1),
    st.sampled_from(["1GB", "6400GB", "100MB"]),
    st.sampled_from([0, 7, 300]),
    st.sampled_from(["layers", "whole"]),
    st.integers(1, 30),
    st.sampled_from(["prefill", "transfer", "decode"]),
)


def check(trace):
    """Check that the bytes of a trace replay and are complete."""
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(trace)
        file.flush()
        assert check_trace(file.name).complete


def requests_of(drawn):
    """Return the requests, in order of arrival."""
    at, requests = 0, []
    for index, (gap, keys, tail, output) in enumerate(drawn):
        at += gap
        prompt = (len(keys) - 1) * BLOCK + tail
        digits = keys.translate(str.maketrans("ab", "12"))
        chained = [int(digits[: n + 1]) for n in range(len(digits))]
        requests.append(ask(index, at, prompt=prompt, output=output, keys=chained))
    return requests


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    SPLITS,
    st.integers(6, 12),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.sampled_from(["fcfs", "priority", "srpt"]),
)
def test_each_request_is_served_once(drawn, split, blocks, max_seqs, chunked, scheduler):
    """Each request ends once in tight memory, and transfers move its missing blocks.

    The trace is valid, and a second run writes the same bytes.
    """
    requests = requests_of(drawn)
    options = {"blocks": blocks, "max_seqs": max_seqs, "max_tokens": 8, "chunked": chunked}
    options["scheduler"] = scheduler
    run = serve_cluster(requests, split=split, **options)
    result, rows = run.result, run.result.phases.transfers
    assert Counter(result.log.ids) == Counter(request.id for request in requests)
    by_id = {request.id: request for request in requests}
    for index, name in enumerate(rows.ids):
        prompt = -(-by_id[name].prompt_tokens // BLOCK)
        assert rows.blocks[index] + rows.reused[index] == prompt
        assert rows.size[index] == rows.blocks[index] * SLOT
        assert rows.ended[index] <= rows.done[index]
    assert result.phases.moved_bytes == sum(rows.size)
    assert sum(line["bytes"] for line in run.of("TRANSFER")) == sum(rows.size)
    check(run.trace)
    again = serve_cluster(requests, split=split, **options)
    assert again.trace == run.trace


@settings(max_examples=40, deadline=None)
@given(REQUESTS, SPLITS, st.integers(0, 3), st.integers(0, 300), st.integers(1, 200))
def test_failures_lose_no_request(drawn, split, replica, at, gone):
    """Each request ends once, whichever replica fails."""
    requests = requests_of(drawn)
    replica %= 2
    failures = [f"replica={replica},at={at}ns,for={gone}ns"]
    run = serve_cluster(requests, split=split, failures=failures, blocks=12)
    check(run.trace)
    assert Counter(run.result.log.ids) == Counter(request.id for request in requests)
    assert run.result.phases.moved_bytes >= sum(run.result.phases.transfers.size)


@settings(max_examples=30, deadline=None)
@given(REQUESTS, SPLITS)
def test_littles_law_of_each_pool(drawn, split):
    """The mean number of requests at a pool is their rate times the mean time there.

    The number is counted along the trace, from ROUTE to FINISH; the time is by request.
    """
    run = serve_cluster(requests_of(drawn), split=split)
    numbers = {each: pool for pool, all_ in run.result.phases.pools.items() for each in all_}
    count, last, area = Counter(), 0, Counter()
    came, stay = {}, Counter()
    for line in run.lines:
        for pool, inside in count.items():
            area[pool] += inside * (line["t"] - last)
        last = line["t"]
        if line["event"] not in ("ROUTE", "FINISH", "REJECT") or "replica" not in line:
            continue
        pool, key = numbers[line["replica"]], (line["replica"], line["request"])
        if line["event"] == "ROUTE":
            count[pool] += 1
            came[key] = line["t"]
        else:
            count[pool] -= 1
            stay[pool] += line["t"] - came.pop(key)
    assert not came
    assert +area == +stay


@pytest.mark.parametrize("prompt", [5, 17, 40])
@pytest.mark.parametrize(
    ("bandwidth", "is_earlier"),
    [("100MB", True), ("3GB", True), ("64GB", True), ("6400GB", False)],
)
def test_a_transfer_by_layers_ends_no_later(bandwidth, is_earlier, prompt):
    """A request ends earlier by layers than by a whole transfer, unless the link is fast.

    With a link that moves a block in less than a nanosecond both end at the same time.
    """
    ends = {}
    for overlap in ("layers", "whole"):
        split = f"prefill=1,decode=1,latency=5ns,bandwidth={bandwidth},overlap={overlap}"
        request = [ask("a", prompt=prompt, output=4)]
        run = serve_cluster(request, split=split, max_tokens=8, max_seqs=4, trace=False)
        ends[overlap] = run.result.log.finish[0]
    assert ends["layers"] <= ends["whole"]
    assert (ends["layers"] < ends["whole"]) is is_earlier
