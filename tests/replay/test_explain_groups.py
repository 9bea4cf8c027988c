"""Why a request missed in a cache of groups, and which group was short."""

import json

import pytest
from helpers.grouped_traces import grouped_run
from helpers.requests import keyed

from kvcore import Trace, read_events
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_replay.misses.explain import explain
from kvcore_replay.report.misses import RequestReport, SummaryReport
from kvcore_replay.state.groups import GroupState

FULL, WINDOW, STATE = LayerGroup("full", 8), LayerGroup("window", 8, 17), LayerGroup("state", 8)


def ask(name, keys):
    """Return a request whose prompt fills the blocks of `keys`, and one token more."""
    return keyed(name, keys, 8, more=1, output_tokens=1)


def computed(path, requests, groups, blocks=90):
    """Compute prompts one after the other in a traced cache; return the explanation."""
    with Trace(path) as trace:
        cache = GroupedCache(groups, blocks, key_tokens=8, trace=trace)
        for now, request in enumerate(requests):
            cache.now = now
            cache.compute(request, 64)
    return explain(path)


def losses(explanation, request):
    """Return category, first token, tokens and short groups of the segments of a request."""
    found = explanation.of(request).losses
    return [(loss.category, loss.first, loss.tokens, loss.groups) for loss in found]


LONG = list(range(1, 9))


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_what_a_window_or_state_has_not_kept_is_named(kind, tmp_path):
    """A prompt that leaves another in its middle misses there, since only full layers hit."""
    branch = [*LONG[:4], 51, 52]
    found = computed(tmp_path / "t.jsonl", [ask("a", LONG), ask("b", branch)], [FULL, kind])
    assert losses(found, "b") == [("unkept", 0, 32, (1,)), ("compulsory", 32, 17, ())]
    text = str(RequestReport(found, found.of("b")))
    assert f"Short at token 32: group 1 ({kind.kind}); 0 (full) has its blocks." in text
    assert "Request a had them before." in text


def test_what_a_junction_keeps_hits(tmp_path):
    """The request after the one that found a junction hits up to there."""
    branches = [[*LONG[:4], 50 + n, 60 + n] for n in range(2)]
    requests = [ask("a", LONG), ask("b", branches[0]), ask("c", branches[1])]
    found = computed(tmp_path / "t.jsonl", requests, [FULL, WINDOW])
    assert found.of("c").hit == 32
    assert losses(found, "c") == [("compulsory", 32, 17, ())]


def test_an_evicted_block_of_a_group_is_named(tmp_path):
    """A miss names the last eviction of blocks that a group needs, and its requester."""
    requests = [ask("a", LONG), ask("b", list(range(100, 108))), ask("a2", LONG)]
    found = computed(tmp_path / "t.jsonl", requests, [FULL, WINDOW], blocks=18)
    (first, *_) = found.of("a2").losses
    assert first.category == "evicted"
    assert first.eviction.beneficiary == "b"
    assert first.eviction.user == first.other == "a"
    assert first.groups
    text = str(RequestReport(found, found.of("a2")))
    assert "Evicted at 1 ns by lru for request b" in text
    assert "The optimum" not in text


def test_what_no_memory_would_have_kept_is_not_evicted(tmp_path):
    """Where a window was never kept, tokens are unkept, even if full attention lost them."""
    branch = [*LONG[:4], 51, 52]
    asked = {"a": LONG[:2], "a2": LONG, "flood": list(range(100, 109)), "b": branch}
    requests = [ask(name, keys) for name, keys in asked.items()]
    found = computed(tmp_path / "t.jsonl", requests, [FULL, WINDOW], blocks=18)
    assert losses(found, "b") == [
        ("evicted", 0, 16, (0,)),
        ("unkept", 16, 16, (0, 1)),
        ("compulsory", 32, 17, ()),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_segments_are_the_prompt_and_short_groups_are_short(seed, tmp_path):
    """Segments add up to the prompt, and the groups of each lack blocks at its end."""
    path = tmp_path / "t.jsonl"
    grouped_run(seed, path)
    found, header, *lines = explain(path), *read_events(path)
    state, seen = GroupState(header), 0
    for line in lines:
        first = line.event in ("HIT", "MISS") and line.seq not in state.sequences
        if first and not line.again:
            each = found.of(line.request)
            ends = [each.hit, *(loss.end for loss in each.losses)]
            assert [loss.first for loss in each.losses] == ends[:-1]
            assert ends[-1] == each.tokens
            for loss in each.losses:
                seen += len(loss.groups)
                served = [state.serves(line.request, loss.end, group) for group in state.groups]
                assert not any(served[index] for index in loss.groups)
                if loss.category == "unkept":
                    assert [n for n, can in enumerate(served) if not can] == [*loss.groups]
        state.apply(line)
    assert seen


def test_a_summary_adds_up_what_each_group_was_short_for(tmp_path):
    """The tokens of each group are those of the segments that name it, in text and in JSON."""
    path = tmp_path / "t.jsonl"
    grouped_run(3, path)
    found = explain(path)
    summary = found.summary()
    for index, short in enumerate(summary.groups):
        segments = [loss for request in found.requests.values() for loss in request.losses]
        assert short.tokens == sum(loss.tokens for loss in segments if index in loss.groups)
    report = SummaryReport.from_explanation(found, summary)
    document = json.loads(json.dumps(report.summary))
    assert len(document["groups"]) == len(document["cache_groups"]) == len(report.groups.rows)
    assert document["optimum"] is None
    assert "No optimum is known of cache groups" in report.notes
    assert sum(lost["tokens"] for lost in document["lost"].values()) == summary.missed_tokens
