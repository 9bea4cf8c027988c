"""Why a request missed in a cache with a pool for each kind of layer, and which was short."""

import json

import pytest
from helpers.pooled_traces import pooled_run
from helpers.requests import keyed
from helpers.traces import lines, seal

from kvcore import Trace, TraceError
from kvcore_plugins.layer_pools import PooledCache
from kvcore_plugins.traces.reader import read_events
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.report.checks import trace_sections
from kvcore_replay.report.live import LiveView
from kvcore_replay.report.misses import RequestReport, SummaryReport

WINDOW = {"window": 9, "window_slots": 170}


def text(number, length=100):
    """Return the keys of a prompt that no other number has."""
    return [1000 * number + index for index in range(length)]


def computed(path, prompts, blocks=9000, **sizes):
    """Compute prompts one after the other in a traced cache; return the explanation."""
    with Trace(path) as trace:
        cache = PooledCache(
            blocks, 1, prefix="radix:evict=leaf", key_tokens=1, trace=trace, **sizes
        )
        for name, keys in enumerate(prompts):
            request = keyed(name, keys, 1, output_tokens=1)
            cache.now = name
            seq = cache.open(request)
            cache.commit(seq, seq.tokens - seq.computed)
            cache.close(seq)
    check_trace(path)
    return explain(path)


def losses(explanation, request):
    """Return category, first token, tokens and short pools of the segments of a request."""
    segments = explanation.of(request).losses
    return [(loss.category, loss.first, loss.tokens, loss.groups) for loss in segments]


def test_a_tombstone_is_told_with_its_pool(tmp_path):
    """A prefix whose windows were evicted misses, though full attention has it."""
    others = [text(number, 150) for number in range(2, 9)]
    prompts = [text(0), [*text(0), 500], *others, [*text(0), 501]]
    explained = computed(tmp_path / "t.jsonl", prompts, **WINDOW)
    last = len(prompts) - 1
    assert losses(explained, last) == [("tombstone", 0, 100, (1,)), ("compulsory", 100, 1, ())]
    told = str(RequestReport(explained, explained.of(last)))
    assert "Short at token 100: pool 1 (window); 0 (full) has its blocks." in told
    assert "by window for request" in told


@pytest.mark.parametrize("sizes", [WINDOW | {"window_slots": 500}, {"state_slots": 20}])
def test_what_was_not_kept_is_told_with_its_pool(sizes, tmp_path):
    """A prompt that leaves another in its middle finds full attention alone there."""
    branch = [*text(0, 300)[:130], *text(1, 10)]
    explained = computed(tmp_path / "t.jsonl", [text(0, 300), branch], **sizes)
    assert losses(explained, 1)[0] == ("unkept", 0, 130, (1,))


def test_what_full_attention_has_lost_is_evicted(tmp_path):
    """Where a leaf of full attention has left, all pools are short."""
    prompts = [text(0), text(1, 150), text(2, 150), text(0)]
    explained = computed(tmp_path / "t.jsonl", prompts, blocks=310, **WINDOW)
    category, first, _, short = losses(explained, 3)[0]
    assert (category, first, short) == ("evicted", 0, (0, 1))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the path of a trace of a random server with windows and states."""
    path = tmp_path_factory.mktemp("pools") / "trace.jsonl"
    pooled_run(5, path)
    return path


def test_missed_tokens_add_up(recorded):
    """The segments of a prompt are its missed tokens; the summary has those of each pool."""
    explained = explain(recorded)
    for misses in explained.requests.values():
        assert misses.hit + sum(loss.tokens for loss in misses.losses) == misses.tokens
    summary = explained.summary()
    assert summary.categories["tombstone"].tokens > 0
    report = SummaryReport.from_explanation(explained, summary)
    assert [row[0] for row in report.groups.rows] == ["0", "1", "2"]
    document = json.loads(json.dumps(explained.as_dict()))
    assert [pool["kind"] for pool in document["layer_pools"]] == ["full", "window", "state"]
    assert document["optimum"] is None
    assert "No optimum is known of pools of layers" in report.notes


def test_readers_show_the_pools(recorded):
    """The check has a table of the pools, and a live view the share of their slots in use."""
    report = check_trace(recorded)
    _, _, pools, *_ = trace_sections(report)
    assert [row[0] for row in pools.rows] == ["window", "state"]
    header, *events = read_events(recorded)
    view = LiveView(header)
    for event in events:
        view.take(event)
    shown = "\n".join("".join(piece for piece, _ in line) for line in view.lines(100, 30, ""))
    assert "pools     window" in shown


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda line: {"windows": [10**9]} if line["event"] == "KEEP" else {},
            "KEEP: no span 1000000000 is cached",
        ),
        (lambda line: {"layer_pools": {"window": 9}} if not line["n"] else {}, "window slots"),
        (
            lambda line: {"count": "keys"} if not line["n"] else {},
            "pools of layers count tokens",
        ),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_what_trusts_it(
    change, problem, recorded, tmp_path
):
    """A reader that trusts a file refuses pools and spans that there are not, at their line."""
    path = tmp_path / "trace.jsonl"
    seal(path, [line | change(line) for line in lines(recorded)])
    with pytest.raises(TraceError, match=problem):
        explain(path)
